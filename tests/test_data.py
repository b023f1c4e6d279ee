import json
import os
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcorr.config import DataConfig
from flowcorr.data import PromptSet, PromptStream, load_prompts, prompts_digest, read_prompts
from flowcorr.errors import ConfigError
from flowcorr.records import Prompt
from flowcorr.words import is_heldout


def load(path, **keys):
    keys = {"heldout_fraction": 0.3, "num_train": 8, "num_heldout": 1000, **keys}
    return load_prompts(DataConfig(path=str(path), **keys))


def write(folder, text, name="prompts.txt"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_text_file(tmp_path):
    path = write(tmp_path, '\ufeffa cat\n\u200b\n  a sign that says "Hello"  \r\na “Daily” menu\n')
    assert read_prompts(path) == [
        Prompt(text="a cat"),
        Prompt(text='a sign that says "Hello"', target="Hello"),
        Prompt(text="a “Daily” menu", target="Daily"),
    ]


def test_an_ambiguous_target_is_not_guessed(tmp_path):
    lines = ['a sign that says "Hello', "“Open” above “Daily”", 'a 6" and a 12" ruler', 'a "" sign']
    assert [prompt.target for prompt in read_prompts(write(tmp_path, "\n".join(lines)))] == [None] * 4
    given = "\n".join(json.dumps({"prompt": line, "words": "Hello"}) for line in lines)
    path = write(tmp_path, given, "prompts.jsonl")
    assert {prompt.target for prompt in read_prompts(path, target_field="words")} == {"Hello"}


@pytest.mark.parametrize(
    ("name", "line"), [("prompts.txt", "a cat"), ("prompts.jsonl", '{"prompt": "a cat"}')]
)
def test_prompts_know_their_lines(tmp_path, name, line):
    path = write(tmp_path, f"{line}\n\n{line}\n", name)
    assert [prompt.place for prompt in read_prompts(path)] == [f"{path}:1", f"{path}:3"]


def test_jsonl_file(tmp_path):
    lines = [
        '{"prompt": "a sign", "target": "Hello", "style": "neon"}',
        '{"prompt": "a \\"Bye\\" sign"}',
        '{"prompt": "a cat\u2028", "target": null}',
    ]
    assert read_prompts(write(tmp_path, "\n".join(lines), "prompts.jsonl")) == [
        Prompt(text="a sign", target="Hello", metadata={"style": "neon"}),
        Prompt(text='a "Bye" sign', target="Bye"),
        Prompt(text="a cat\u2028"),
    ]


GENEVAL = [
    {"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "a photo of two cups"},
    {"tag": "colors", "include": [{"class": "dog", "color": "red"}], "prompt": "a photo of a red dog"},
]


def test_lines_in_the_form_of_geneval(tmp_path):
    path = write(tmp_path, "\n".join(map(json.dumps, GENEVAL)), "train_metadata.jsonl")
    prompts = read_prompts(path)
    assert [(prompt.text, prompt.tag, prompt.target) for prompt in prompts] == [
        ("a photo of two cups", "counting", None),
        ("a photo of a red dog", "colors", None),
    ]
    assert prompts[0].metadata == {"tag": "counting", "include": [{"class": "cup", "count": 2}]}


def test_a_negative_prompt_is_the_prompts_own(tmp_path):
    lines = [
        '{"prompt": "a cat", "negative_prompt": "blurry", "style": "x"}',
        '{"prompt": "a cat", "negative_prompt": ""}',
    ]
    prompts = read_prompts(write(tmp_path, "\n".join([*lines, '{"prompt": "a cat"}']), "prompts.jsonl"))
    assert [prompt.negative_prompt for prompt in prompts] == ["blurry", "", None]
    assert prompts[0].metadata == {"style": "x"}
    assert len({prompt.key for prompt in prompts}) == 3


def test_one_text_with_several_negative_prompts_is_on_one_side(tmp_path):
    lines = [
        json.dumps({"prompt": f"a cat number {number}", "negative_prompt": negative})
        for number in range(40)
        for negative in ("blurry", "ugly")
    ]
    split = load(write(tmp_path, "\n".join(lines), "prompts.jsonl"))
    assert len(split.train) + len(split.heldout) == 80
    assert not {prompt.text for prompt in split.train} & {prompt.text for prompt in split.heldout}
    held = write(tmp_path, '{"prompt": "a cat number 3", "negative_prompt": "other"}', "held.jsonl")
    split = load(tmp_path / "prompts.jsonl", heldout_path=str(held))
    assert len(split.train) == 78


def test_fields_of_target_and_tag_are_chosen(tmp_path):
    line = '{"prompt": "a \\"big\\" sign %d", "text": "Hello", "category": "Text", "target": "x"}'
    path = write(tmp_path, "\n".join(line % number for number in range(20)), "prompts.jsonl")
    split = load(path, target_field="text", tag_field="category")
    for prompt in split.train + split.heldout:
        assert (prompt.target, prompt.tag) == ("Hello", "Text")
        assert prompt.metadata == {"category": "Text", "target": "x"}


def test_a_target_field_that_no_line_has_is_named(tmp_path):
    """Else the double quotes would be the targets, without a word."""
    lines = [
        '{"prompt": "a \\"red\\" sign", "words": "OPEN"}',
        '{"prompt": "a \\"blue\\" sign", "target": "x"}',
    ]
    path = write(tmp_path, "\n".join(lines), "prompts.jsonl")
    assert [prompt.target for prompt in read_prompts(path, target_field="words")] == ["OPEN", "blue"]
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: data\.target_field='word' .* words\?"):
        read_prompts(path, target_field="word")
    assert len(read_prompts(write(tmp_path, "a sign"), target_field="words")) == 1


def test_lines_of_json_in_a_text_file_are_named(tmp_path):
    path = write(tmp_path, 'a sign\n{"prompt": "a sign", "target": "OPEN"}\n')
    with pytest.raises(ConfigError, match=r"prompts\.txt:2 .* \.jsonl"):
        read_prompts(path)
    assert read_prompts(write(tmp_path, "{a sign}"))[0].text == "{a sign}"


def test_heldout_prompts_of_a_file_of_their_own(tmp_path):
    train = write(tmp_path, "one\ntwo\nthree\n", "train.txt")
    heldout = write(tmp_path, "four\ntwo\nfour\nfive\n", "test.txt")
    split = load(train, heldout_path=str(heldout))
    assert texts(split.train) == ["one", "three"]  # nothing is on both sides
    assert sorted(texts(split.heldout)) == ["five", "four", "two"]  # each text once
    assert len(load(train, heldout_path=str(heldout), num_heldout=2).heldout) == 2
    with pytest.raises(ConfigError, match=r"data\.heldout_path='.*gone\.txt'"):
        load(train, heldout_path=str(tmp_path / "gone.txt"))
    with pytest.raises(ConfigError, match=r"data\.heldout_path='.*train\.txt' .* of 3;"):
        load(train, heldout_path=str(train))


@pytest.mark.parametrize(("number", "wanted", "held_out"), [(5, 2, 2), (5, 128, 2), (2, 9, 1), (9, 3, 3)])
def test_the_error_of_an_empty_side_names_a_split_that_works(tmp_path, number, wanted, held_out):
    path = write(tmp_path, "".join(f"prompt {place}\n" for place in range(number)))
    for fraction in (1e-9, 1 - 1e-9):
        with pytest.raises(ConfigError, match=rf"data\.heldout_fraction={fraction}") as caught:
            load(path, heldout_fraction=fraction, num_heldout=wanted)
        given = float(re.search(r"set data\.heldout_fraction=([\d.]+)", str(caught.value))[1])
        split = load(path, heldout_fraction=given, num_heldout=wanted)
        assert (len(split.heldout), len(split.train)) == (held_out, number - held_out)


def test_one_prompt_cannot_be_split(tmp_path):
    with pytest.raises(
        ConfigError, match=r"has 1 prompts.*data\.num_heldout=4 .*data\.heldout_path"
    ) as caught:
        load(write(tmp_path, "one\n"), num_heldout=4)
    assert "set data.heldout_fraction" not in str(caught.value)


RESPELT = [
    lambda text: f"{text} ",
    lambda text: text.replace(" ", "\u00a0"),
    lambda text: text.replace(" ", "  \u3000"),
    lambda text: text.replace("'", "\u2019").replace(' "', " \u201c").replace('"', "\u201d"),
    lambda text: unicodedata.normalize("NFD", text),
    "\u200b".join,
    lambda text: "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in text),
]


@pytest.mark.parametrize("respelt", RESPELT)
def test_a_prompt_in_another_spelling_is_the_same_prompt(tmp_path, respelt):
    lines = [f"""a caf\u00e9 that's called "Number {number}\'s" """.strip() for number in range(60)]
    others = [json.dumps({"prompt": respelt(line)}) for line in lines]
    plain, spelt = write(tmp_path, "\n".join(lines)), write(tmp_path, "\n".join(others), "spelt.jsonl")
    split, other = load(plain), load(spelt)
    assert [respelt(text) for text in texts(split.train)] == texts(other.train)
    assert [respelt(text) for text in texts(split.heldout)] == texts(other.heldout)
    assert prompts_digest(split) == prompts_digest(other)
    both = write(
        tmp_path, "\n".join([*map(json.dumps, ({"prompt": line} for line in lines)), *others]), "both.jsonl"
    )
    assert len(load(both).heldout) == len(split.heldout)  # each once
    with pytest.raises(ConfigError, match=r"data\.heldout_path='.*spelt\.jsonl' .* of 60;"):
        load(plain, heldout_path=str(spelt))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"prompt": "a"', r"not JSON \(.* 15\).*\"prompt\": "),
        ('["a"]', "JSON list"),
        ('{"text": "a"}', r'no "prompt" \(rename "text"'),
        ('{"caption": "a"}', r'no "prompt" \(rename "caption"'),
        ('{"prompt": 3}', '"prompt": 3,'),
        ('{"prompt": "  "}', '"prompt": "  ",'),
        ('{"prompt": "\\u200b"}', r'"prompt": "\\u200b",'),
        ('{"prompt": "a", "target": ["b"]}', r'"target": \["b"\],'),
        ('{"prompt": "a", "tag": 3}', '"tag": 3,'),
        ('{"prompt": "a", "prompt": "b"}', r"\(the key 'prompt'"),
        ('{"prompt": "a", "box": {"x": 1, "x": 2}}', r"\(the key 'x'"),
        ('{"prompt": "a\\u0000b"}', r'"prompt": "a\\u0000b", a zero'),
        ('{"prompt": "\\ud83d sign"}', r'"prompt": "\\ud83d sign", half'),
        ('{"prompt": "a", "score": NaN}', "number NaN"),
        ('{"prompt": "a", "score": -Infinity}', "number -Infinity"),
        ('{"prompt": "a", "score": 1e999}', "number 1e999"),
        ('{"prompt": "a", "box": [{"x": NaN}]}', "number NaN"),
        pytest.param(
            '{"prompt": "a", "score": %s}' % ("1" * 5000), r"JSON .*\(.*4300 digits", id="5000 digits"
        ),
        pytest.param('{"prompt": "a", "score": %s}' % ("[" * 10**5), r"JSON .*\(", id="deep nesting"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, named):
    path = write(tmp_path, f'{{"prompt": "good"}}\n{line}\n', "prompts.jsonl")
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl:2 .*{named}"):
        load(path)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "one\n")
    assert [prompt.place for prompt in read_prompts(Path("~/prompts.txt"))] == ["~/prompts.txt:1"]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path='.*absent\.txt' .*tiny_words"):
        load(tmp_path / "absent.txt")


UTF_16 = '{"prompt": "a sign"}'.encode("utf-16-le")
"""As some editors write it, without a mark: each second byte is zero, and the file reads as UTF-8."""


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("prompts.txt", b"", "no prompt;"),
        ("prompts.txt", b"\n  \n", "no prompt;"),
        ("prompts.txt", b"\xff\xfe\x00a", "UTF-8 .*0xff"),
        ("prompts.txt", UTF_16, "UTF-16"),
        ("prompts.jsonl", UTF_16, "UTF-16"),
    ],
)
def test_a_file_without_readable_prompts_is_named(tmp_path, name, content, named):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"data\.path='.*{name}' .*{named}"):
        load(path)


@pytest.mark.parametrize(("name", "suffix"), [("prompts.json", ".json"), ("prompts", ""), ("tiny_word", "")])
def test_other_file_types_are_refused(tmp_path, name, suffix):
    with pytest.raises(ConfigError, match=rf"file type='{suffix}' .* \.txt, \.jsonl$"):
        load(tmp_path / name)


def test_split_is_a_partition_of_about_the_right_size(tmp_path):
    lines = [f"prompt {number}" for number in range(1000)]
    split = load(write(tmp_path, "\n".join(lines)))
    assert sorted(texts(split.train) + texts(split.heldout)) == sorted(lines)
    assert 240 < len(split.heldout) < 360  # 300 expected, standard deviation 14.5


def test_split_depends_on_the_text_alone(tmp_path):
    lines = [f"prompt {number}" for number in range(100)]
    whole = load(write(tmp_path, "\n".join(lines)))
    half_reversed = load(write(tmp_path, "\n".join(reversed(lines[:50]))))
    assert set(texts(half_reversed.heldout)) == set(texts(whole.heldout)) & set(lines[:50])
    repeated = load(write(tmp_path, "\n".join([*lines, *lines])))
    assert set(texts(repeated.heldout)).isdisjoint(texts(repeated.train))
    assert texts(repeated.heldout) == texts(whole.heldout)


def test_number_of_heldout_prompts_is_bounded(tmp_path):
    lines = [f"prompt {number}" for number in range(100)]
    turned_round = load(write(tmp_path, "\n".join(reversed(lines))), num_heldout=5)
    path = write(tmp_path, "\n".join(lines))
    assert turned_round.heldout == load(path, num_heldout=5).heldout
    assert load(path, num_heldout=5).heldout == load(path).heldout[:5]
    assert len(load(path, num_heldout=5).train) == len(load(path).train)


def test_tiny_words():
    split = load("tiny_words", num_train=20, num_heldout=10)
    assert (len(split.train), len(split.heldout)) == (20, 10)
    assert all(prompt.text == prompt.target for prompt in split.train + split.heldout)
    assert not any(is_heldout(prompt.text) for prompt in split.train)
    assert all(is_heldout(prompt.text) for prompt in split.heldout)
    assert load("tiny_words", num_train=20, num_heldout=10).train == split.train


def test_too_many_tiny_words_are_refused():
    with pytest.raises(ConfigError, match=r"data\.num_heldout=10000000"):
        load("tiny_words", num_heldout=10_000_000)


PROMPTS = tuple(Prompt(text=str(number)) for number in range(10))


def test_each_epoch_deals_every_prompt_once_in_another_order():
    stream = PromptStream(PROMPTS, seed=0)
    epochs = [texts(stream.next(10)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(texts(PROMPTS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream.position == 30


def test_seeds_give_different_orders():
    assert PromptStream(PROMPTS, seed=0).next(10) != PromptStream(PROMPTS, seed=1).next(10)


@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=6),
    position=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_stream_does_not_depend_on_batches_or_interruption(sizes, position, seed):
    whole = PromptStream(PROMPTS, seed=seed).next(position + sum(sizes))[position:]
    resumed = PromptStream(PROMPTS, seed=seed, position=position)
    assert [prompt for size in sizes for prompt in resumed.next(size)] == whole
    assert resumed.position == position + sum(sizes)


@given(position=st.integers(0, 30), skip=st.integers(0, 30), n=st.integers(0, 12))
def test_a_peek_is_what_will_be_dealt(position, skip, n):
    stream = PromptStream(PROMPTS, seed=3, position=position)
    ahead = stream.peek(n, skip=skip)
    assert stream.position == position
    stream.next(skip)
    assert stream.next(n) == ahead


def test_spellings_of_a_text_are_peeked_at_once():
    prompts = tuple(Prompt(text=text) for text in ("don't", "don\u2019t", "caf\u00e9", "cafe\u0301"))
    assert len(PromptStream(prompts, seed=0).peek_distinct(4)) == 2


@given(position=st.integers(0, 20), n=st.integers(0, 5))
def test_different_texts_are_looked_for_in_a_whole_epoch(position, n):
    prompts = tuple(Prompt(text=text) for text in ("cat", "cat", "cat", "cat", "dog"))
    stream = PromptStream(prompts, seed=3, position=position)
    found = texts(stream.peek_distinct(n))
    assert stream.position == position
    assert found == list(dict.fromkeys(texts(stream.next(10))))[:n]
    assert len(found) == min(n, 2)


def test_the_digest_is_that_of_all_fields_in_order():
    def digest_of(parts):
        train, heldout = parts
        return prompts_digest(PromptSet(train=train, heldout=heldout))

    first = Prompt(text="a caf\u00e9", target="menu", tag="sign", metadata={"tag": "sign", "style": "ink"})
    second, held = Prompt(text="b"), Prompt(text="c")
    expected = "9ed53417b8edb19d45df91900a342790c8bdced5f88468350547d6dc82206338"
    assert digest_of(((first, second), (held,))) == expected
    assert digest_of(((replace(first, place="other.txt:7"), second), (held,))) == expected
    others = (
        ((first,), (held,)),
        ((second, first), (held,)),
        ((first,), (second, held)),
        ((first, second, held), ()),
        *(
            ((other, second), (held,))
            for other in (
                replace(first, text="a cafe"),
                replace(first, target=None),
                replace(first, target="sign", tag="menu"),
                replace(first, metadata={"tag": "sign", "style": "neon"}),
            )
        ),
        ((first, replace(second, target="")), (held,)),
    )
    digests = {digest_of(other) for other in others}
    assert len(digests) == len(others)
    assert expected not in digests


def test_empty_stream_is_refused():
    with pytest.raises(ConfigError, match="^prompts="):
        PromptStream((), seed=0)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_not_waited_for(make, tmp_path):
    make(tmp_path / "prompts.txt")
    with pytest.raises(ConfigError, match=r"data\.path='.*prompts\.txt' is a folder"):
        read_prompts(tmp_path / "prompts.txt")
