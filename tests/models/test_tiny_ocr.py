from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from pretrain import load, sample
from render_words import FONT_FILE

from flowcorr.models import resolve_path
from flowcorr.rewards.ocr import OcrReward, compare
from flowcorr.words import heldout_words

MODEL_DIR = Path(resolve_path("tiny_ocr"))


@pytest.fixture(scope="module")
def pipeline():
    return load(MODEL_DIR)


def test_it_loads_as_any_other_pipeline_in_float32():
    pipeline = StableDiffusion3Pipeline.from_pretrained(MODEL_DIR)

    modules = [item for item in pipeline.components.values() if isinstance(item, torch.nn.Module)]
    assert len(modules) == 5
    assert {parameter.dtype for item in modules for parameter in item.parameters()} == {torch.float32}


def test_it_is_small_and_its_font_is_licensed():
    files = [file for folder in (MODEL_DIR, FONT_FILE.parent) for file in folder.rglob("*") if file.is_file()]

    assert sum(file.stat().st_size for file in files) <= 6_000_000
    assert not [file for file in files if file.suffix in {".bin", ".pt", ".pkl"}]
    assert "Bitstream Vera" in (FONT_FILE.parent / "LICENSE_DEJAVU").read_text()


def test_tokens_are_characters(pipeline):
    ids = pipeline.tokenizer(["abc", "cab", "wxyz"]).input_ids

    assert [len(word) for word in ids] == [5, 5, 6]  # begin, characters, end
    assert ids[0][1] == ids[1][2]  # the same letter, the same token, unless it ends the word
    assert pipeline.tokenizer.tokenize("abc") == ["a", "b", "c</w>"]
    assert pipeline.tokenizer.model_max_length == 8


def test_the_third_encoder_stands_for_no_encoder(pipeline):
    with torch.no_grad():
        with_t5, _, _, _ = pipeline.encode_prompt(
            ["abc"], None, None, do_classifier_free_guidance=False, max_sequence_length=8
        )

    assert with_t5.shape == (1, 16, 64)
    assert not with_t5[:, 8:].any()
    assert float(with_t5[:, :8].std()) == pytest.approx(
        1.4, abs=0.3
    )  # token plus position, both of unit scale


def test_padding_does_not_change_the_picture(pipeline):
    def draw(max_sequence_length):
        return pipeline(
            ["word", "abc"],
            height=32,
            width=64,
            num_inference_steps=4,
            guidance_scale=1.0,
            max_sequence_length=max_sequence_length,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images

    assert abs(draw(8) - draw(256)).mean() < 0.05


@pytest.mark.slow
def test_it_writes_words_and_often_spoils_them(pipeline):
    words = heldout_words(48)
    exact, similarity = compare(OcrReward().read(sample(pipeline, words)), words)

    assert 0.2 <= exact.mean() <= 0.7
    assert exact.mean() < similarity.mean() < 1
