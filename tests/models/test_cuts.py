import copy
import logging
import re

import pytest
import torch
from PIL import Image
from tiny_pipelines import FAMILIES, build_tiny_sd3

from flowcorr.config import ModelConfig
from flowcorr.models import Guidance, load_family
from flowcorr.models.cuts import CutReport, describe_cuts, readers
from flowcorr.models.prompt_cache import PromptCache
from flowcorr.records import Prompt
from flowcorr.references import Reference
from tests.prompts import prompts_of

LENGTH = 40


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory):
    path = str(FAMILIES[request.param].build(tmp_path_factory.mktemp("models") / "model"))
    return load_family(ModelConfig(path=path, max_sequence_length=LENGTH))


@pytest.fixture
def family(loaded):
    """The loaded model, with a report and encoders of its own: a test reports prompts, and frees encoders."""
    family = copy.copy(loaded)
    family.pipeline = copy.copy(loaded.pipeline)
    family.cuts = CutReport(family)
    return family


def sign(words, *, filler=0, place=None):
    return Prompt(text="ab " * filler + f'a "{words}" sign', target=words, place=place)


BEYOND = re.compile(r"(\d+) of (\d+) beyond (\d+) tokens(?:, (\d+) of which lose words)?")
EQUAL = re.compile(r"(\d+) become equal")
SHORT = sign("ok")
LONG = [sign("cat", filler=60, place="p.txt:2"), sign("dog", filler=60, place="p.txt:3")]
EARLY = Prompt(text='"ok" ' + "ab " * 60, target="ok", place="p.txt:4")


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "flowcorr.models.cuts"]


def test_each_family_says_once_what_is_cut(family, caplog):
    caplog.set_level(logging.WARNING)
    family.cuts.add([SHORT, *LONG, EARLY])
    (line,) = lines(caplog)
    limit = readers(family)[-1].limit  # of the long encoder
    _, count, beyond, lost = BEYOND.findall(line)[-1]
    assert (count, beyond, lost) == ("4", str(limit), "2")
    assert EQUAL.findall(line) == ["2"]
    assert f"raise model.max_sequence_length={LENGTH}" in line
    conditioning = family.encode(LONG, Guidance())
    assert all(torch.equal(rows[0], rows[1]) for rows in conditioning.values())  # they are equal indeed
    PromptCache(family, Guidance(), (*LONG, EARLY))
    assert len(lines(caplog)) == 1


def test_a_cache_says_it_for_all_its_prompts_at_once(family, caplog, monkeypatch):
    monkeypatch.setattr("flowcorr.models.prompt_cache.CHUNK_TOKENS", LENGTH)  # prompts are encoded one by one
    PromptCache(family, Guidance(), (*LONG, EARLY))
    (line,) = lines(caplog)
    assert BEYOND.search(line).groups()[:2] == ("3", "3")


def test_a_negative_prompt_is_read_to_its_end_or_named(family, caplog):
    guidance = Guidance(guidance_scale=3.0, true_cfg_scale=3.0, negative_prompt="ab " * 60)
    family.encode(prompts_of(["ok"]), guidance)
    named = any("sampling.negative_prompt is the first" in line for line in lines(caplog))
    assert named == family.encodes_negative


def test_the_check_counts_the_tokens_that_the_pipeline_is_given(family, monkeypatch):
    """A family's template and limits are those that its pipeline uses."""
    prompt = LONG[0].text
    called: dict[str, list[tuple]] = {}
    own = {}
    for reader in readers(family):
        kind = type(reader.tokenizer)
        own[id(reader.tokenizer)] = reader

        def spy(self, text, *arguments, original=kind.__call__, **options):
            if options.get("truncation") and id(self) in own:
                texts = [text] if isinstance(text, str) else list(text)
                called.setdefault(own[id(self)].name, []).extend(
                    (each, options["max_length"]) for each in texts
                )
            return original(self, text, *arguments, **options)

        monkeypatch.setattr(kind, "__call__", spy)
    family.embed(prompts_of([prompt]), Guidance())
    for reader in readers(family):
        ((text, limit),) = set(called[reader.name])
        assert text == family.tokenized_text(prompt)
        # Qwen-Image's pipeline cuts what was encoded, and its tokenizer far behind.
        assert limit == reader.limit or (family.name == "qwen_image" and limit == 1024 + 34)
    monkeypatch.undo()


def test_a_cut_of_one_encoder_beside_one_that_reads_all_is_mild(tmp_path):
    family = load_family(ModelConfig(path=str(build_tiny_sd3(tmp_path / "sd3")), max_sequence_length=LENGTH))
    clip, other, t5 = readers(family)
    assert (clip.limit, other.limit, t5.limit) == (8, 8, LENGTH)
    line = describe_cuts(family, [sign("open now")])
    assert f"{clip.name} and {other.name}: " in line
    assert BEYOND.search(line).groups()[:3] == ("1", "1", "8")
    assert t5.name in line.rpartition("; ")[2]  # reads all
    family.pipeline.text_encoder_3 = None  # as where T5 is not loaded
    assert t5.name not in describe_cuts(family, [sign("open now")])
    assert describe_cuts(family, [Prompt(text="ok")]) is None


def test_a_target_is_found_as_a_word_of_its_own(tmp_path):
    family = load_family(ModelConfig(path=str(build_tiny_sd3(tmp_path / "sd3")), max_sequence_length=8))
    late = "category " * 9 + '"cat"'
    assert BEYOND.search(describe_cuts(family, [Prompt(text=late, target="cat")]))[4] == "1"
    for target in ("cow", None):  # not in the prompt, and none
        assert BEYOND.search(describe_cuts(family, [Prompt(text=late, target=target)]))[4] is None


def test_a_template_may_trim_or_change_a_prompt(tmp_path, monkeypatch):
    family = load_family(ModelConfig(path=str(build_tiny_sd3(tmp_path / "sd3")), max_sequence_length=8))
    prompt = Prompt(text=f' {"category " * 9}"cat"\n', target="cat")
    for template, lost in ((str, "1"), (str.strip, "1"), (str.upper, None)):
        monkeypatch.setattr(type(family), "tokenized_text", lambda self, text, change=template: change(text))
        assert BEYOND.search(describe_cuts(family, [prompt]))[4] == lost


def test_a_family_gets_the_check_without_a_line_of_its_own(tmp_path, monkeypatch):
    """Without `text_shapes` an encoder reads what the run asks for, or less where its tokenizer says so."""
    family = load_family(ModelConfig(path=str(build_tiny_sd3(tmp_path / "sd3")), max_sequence_length=LENGTH))
    monkeypatch.setattr(family, "text_shapes", lambda configs, length: None)
    assert [reader.limit for reader in readers(family)] == [8, 8, LENGTH]


def test_references_of_other_proportions_are_told_once_with_their_loss(family, tmp_path, caplog):
    if family.num_references[1] == 0:
        return
    caplog.set_level(logging.WARNING)
    family.reference_size = (64, 64)
    references = []
    for number, size in enumerate([(384, 64), (64, 128), (64, 66), (128, 128)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
        references.append(Reference.of(tmp_path / f"{number}.png"))
    prompts = [
        Prompt(text="ok", images=(image,), place=f"p.txt:{number}") for number, image in enumerate(references)
    ]
    family.cuts.add(prompts)
    family.cuts.add(prompts)
    (line,) = lines(caplog)
    assert "2 of 4 lose up to 83 %" in line
    assert "64 x 64" in line
    assert "p.txt:0 with 384 x 64" in line
