import weakref

import pytest
import torch

from flowcorr.config import ModelConfig
from flowcorr.models import Guidance, load_family, prompt_cache
from flowcorr.models.prompt_cache import CHUNK, PromptCache
from tests.prompts import prompts_of
from tests.tolerances import MEANS

GUIDED = Guidance(guidance_scale=4.0, negative_prompt="bad")


@pytest.fixture
def family():
    return load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))


@pytest.mark.parametrize("guidance", [Guidance(), GUIDED])
def test_rows_equal_a_direct_encoding(family, guidance):
    texts = ["cat", "dog", "bird"]
    direct = family.encode(prompts_of(texts), guidance)
    cache = PromptCache(family, guidance, prompts_of(texts))
    cached = cache(prompts_of(["bird", "cat", "bird"]))
    assert cached.keys() == direct.keys()
    for name, rows in cached.items():
        torch.testing.assert_close(rows, direct[name][[2, 0, 2]], **MEANS)


@pytest.mark.parametrize("max_bytes", [0, 2**30])
def test_spellings_of_a_text_have_the_rows_of_the_first(family, monkeypatch, max_bytes):
    asked = []
    encode = family.encode
    monkeypatch.setattr(
        family,
        "encode",
        lambda prompts, guidance: asked.extend(each.text for each in prompts) or encode(prompts, guidance),
    )
    cache = PromptCache(family, Guidance(), prompts_of(["can't", "can\u2019t", "dog"]), max_bytes=max_bytes)
    rows = cache(prompts_of(["can\u2019t", "can't", "can\u00b4t"]))
    for values in rows.values():
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[0], values[2])
    assert set(asked) == {"can't", "dog"}


def test_prompts_that_are_encoded_one_by_one_have_the_same_rows(family, monkeypatch):
    texts = ["cat", "dog", "bird"]
    direct = family.encode(prompts_of(texts), GUIDED)
    monkeypatch.setattr(prompt_cache, "CHUNK_TOKENS", family.text_tokens)
    assert prompt_cache.chunk_size(family.text_tokens) == 1
    for name, rows in PromptCache(family, GUIDED, prompts_of(texts))(prompts_of(texts)).items():
        torch.testing.assert_close(rows, direct[name], **MEANS)


def test_encoders_are_freed_once_all_prompts_are_known(family):
    PromptCache(family, Guidance(), prompts_of(["cat"]))
    assert family.pipeline.text_encoder is None
    assert family.pipeline.text_encoder_2 is None
    assert family.pipeline.text_encoder_3 is None


def test_encoders_wait_in_main_memory_where_the_embeddings_do_not_fit(family, caplog, monkeypatch):
    texts = ["cat", "dog"]
    expected = {text: family.encode(prompts_of([text]), Guidance()) for text in texts}
    with caplog.at_level("INFO"):
        cache = PromptCache(family, Guidance(), prompts_of(texts), max_bytes=1)
    assert ["text encoders" in text for text in caplog.messages] == [True]
    assert family.pipeline.text_encoder is not None
    moves = []
    move = family.move_text_encoders
    monkeypatch.setattr(family, "move_text_encoders", lambda device: moves.append(device) or move(device))
    together = cache(prompts_of(["dog", "cat"]))
    assert moves == [next(family.transformer.parameters()).device, torch.device("cpu")]
    cache(prompts_of(["dog"]))
    assert len(moves) == 2  # nothing to encode
    for row, text in enumerate(["dog", "cat"]):
        for name, rows in together.items():
            assert torch.equal(rows[row], expected[text][name][0]), name


@pytest.mark.usefixtures("group_offloading")
@pytest.mark.parametrize("max_bytes", [1, 10**9])
def test_offloaded_encoders_give_the_same_rows_and_are_freed(family, max_bytes):
    texts = ["cat", "dog"]
    expected = PromptCache(family, GUIDED, prompts_of(texts))(prompts_of(texts))
    offloaded = load_family(ModelConfig(path="tiny_ocr", max_sequence_length=8))
    offloaded.offload_text_encoders("cpu")
    encoder = weakref.ref(offloaded.pipeline.text_encoder_3)
    rows = PromptCache(offloaded, GUIDED, prompts_of(texts), max_bytes=max_bytes)(prompts_of(texts))
    assert rows.keys() == expected.keys()
    for name in rows:
        torch.testing.assert_close(rows[name], expected[name])
    assert (encoder() is None) == (max_bytes > 1)


def test_rows_that_do_not_fit_are_dropped_oldest_first(family, monkeypatch):
    texts = ["cat", "dog", "bird", "fish"]
    row = sum(rows.nbytes for rows in family.encode(prompts_of(["cat"]), Guidance()).values())
    cache = PromptCache(family, Guidance(), prompts_of(texts), max_bytes=2 * row)
    asked = []
    encode = family.encode
    monkeypatch.setattr(
        family,
        "encode",
        lambda prompts, guidance: asked.extend(each.text for each in prompts) or encode(prompts, guidance),
    )
    for text in ("cat", "dog", "cat", "bird"):  # bird takes the place of dog, the longest not asked for
        cache(prompts_of([text]))
    assert asked == ["cat", "dog", "bird"]
    cache(prompts_of(["cat", "bird"]))
    assert asked == ["cat", "dog", "bird"]
    assert len(cache(prompts_of(texts))["prompt_embeds"]) == len(texts)  # a call that does not fit itself
    assert asked == ["cat", "dog", "bird", "dog", "fish"]
    cache(prompts_of(["cat"]))
    assert asked == ["cat", "dog", "bird", "dog", "fish"]
    cache(prompts_of(["dog"]))
    cache(prompts_of(["cat"]))
    assert asked[5:] == ["dog"]  # only two rows fit, and cat was asked for last
    cache(prompts_of(["fish"]))
    assert asked[5:] == ["dog", "fish"]


def test_the_negative_prompt_is_stored_once(family):
    texts = ["cat", "dog", "bird"]
    encoded = family.encode(prompts_of(texts), GUIDED)
    negative = sum(rows[0].nbytes for name, rows in encoded.items() if name.startswith("negative_"))
    bare = sum(rows.nbytes for name, rows in encoded.items() if not name.startswith("negative_"))
    PromptCache(family, GUIDED, prompts_of(texts), max_bytes=bare + negative)
    assert family.pipeline.text_encoder is None  # all rows fit


@pytest.mark.parametrize("max_bytes", [1, 10**9])
def test_the_negative_prompt_is_encoded_with_the_first_prompts_only(family, max_bytes):
    texts = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    rows = []
    family.pipeline.text_encoder.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    PromptCache(family, GUIDED, prompts_of(texts), max_bytes=max_bytes)(prompts_of(texts))
    again = CHUNK + 1 if max_bytes == 1 else 0  # the first chunk was not kept, nor its negative prompt
    assert sum(rows) == len(texts) + again + 1


def test_more_prompts_than_a_chunk(family):
    texts = [a + b + c for a in "abcde" for b in "fghij" for c in "klm"]
    assert len(texts) > CHUNK
    last = family.encode(prompts_of([texts[-1]]), Guidance())
    cache = PromptCache(family, Guidance(), prompts_of([*texts, *texts]))
    rows = cache(prompts_of(texts))
    assert len(rows["prompt_embeds"]) == len(texts)
    torch.testing.assert_close(rows["prompt_embeds"][-1], last["prompt_embeds"][0])
