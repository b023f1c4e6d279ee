"""Unit embeddings by a CLIP checkpoint."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from flowcorr.errors import ConfigError
from flowcorr.rewards.clip import load_clip

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 24, 40, 3), dtype=np.uint8)
TEXTS = ["a cat", "dog", "a cat", "a very long prompt that must be cut"]


@pytest.fixture(scope="module")
def clip(clip_folder):
    return load_clip("mine", clip_folder, clip_folder, "cpu", "float32")


def test_embeddings_are_unit_vectors_in_the_order_of_what_was_given(clip):
    images, texts = clip.embed_images(IMAGES, 2), clip.embed_texts(TEXTS, 3)
    assert images.shape == (5, clip.width)
    assert texts.shape == (4, clip.width)
    torch.testing.assert_close(torch.cat([images, texts]).norm(dim=1), torch.ones(9))
    assert torch.equal(texts[0], texts[2])
    assert not torch.allclose(texts[0], texts[1], atol=1e-2)
    torch.testing.assert_close(clip.embed_texts(["dog"], 1)[0], texts[1], rtol=1e-4, atol=1e-5)


def test_the_logit_scale_is_that_of_the_checkpoint(clip):
    assert clip.logit_scale == pytest.approx(np.exp(2.6592), rel=1e-4)


def test_a_checkpoint_is_loaded_once(clip, clip_folder):
    assert load_clip("mine", clip_folder, clip_folder, "cpu", "float32") is clip


def test_weights_in_a_pickle_are_not_loaded(clip_folder, tmp_path):
    """Loading a pickle can run code; the error says how to convert it."""
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConfigError, match=f"^reward mine: path='{folder}'.*CLIPModel.*save_pretrained"):
        load_clip("mine", str(folder), clip_folder, "cpu", "float32")


@pytest.mark.parametrize("name", ["visual_projection.weight", "logit_scale"])
def test_a_weight_that_no_file_has_is_named(clip_folder, tmp_path, name):
    """Transformers would draw it at random."""
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"^reward mine: .*path='{folder}' .* {name},"):
        load_clip("mine", str(folder), clip_folder, "cpu", "float32")


def test_a_tokenizer_without_its_vocabulary_is_named(clip_folder, tmp_path):
    """Transformers would read every prompt as unknown tokens."""
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"processor='{folder}' .*tokenizer\.json"):
        load_clip("mine", clip_folder, str(folder), "cpu", "float32")


def test_a_processor_of_images_of_another_size_is_named(clip_folder, tmp_path):
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            text = (folder / name).read_text()
            (folder / name).write_text(text.replace("32", "16"))
    with pytest.raises(ConfigError, match=f"path='{clip_folder}' .*processor='{folder}' .*16.*32"):
        load_clip("mine", clip_folder, str(folder), "cpu", "float32")


def test_a_processor_with_more_words_than_the_checkpoint_reads_is_named(clip_folder, tmp_path):
    """On a GPU such a word would end the process."""
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    processor.tokenizer.add_tokens(["more"])
    processor.save_pretrained(folder)
    with pytest.raises(ConfigError, match=f"processor='{folder}' .* 55, .*path='{clip_folder}' .* 54;"):
        load_clip("mine", clip_folder, str(folder), "cpu", "float32")


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [("model.safetensors", b"version", "header"), ("config.json", b"[]", "config.json")],
)
def test_a_damaged_file_is_an_error_of_the_path(clip_folder, tmp_path, file, content, named):
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^reward mine: path='{folder}' .*loaded: .*{named}"):
        load_clip("mine", str(folder), clip_folder, "cpu", "float32")


def test_code_in_a_checkpoint_is_not_run(clip_folder, tmp_path, monkeypatch):
    """Nor is anybody asked whether it may be."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "strange",
        "auto_map": {"AutoConfig": "strange.Config", "AutoModel": "strange.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "strange.py").write_text("raise ValueError('the code of a stranger ran')\n")
    with pytest.raises(ConfigError, match=f"^reward mine: path='{folder}' .*custom code ") as caught:
        load_clip("mine", str(folder), clip_folder, "cpu", "float32")
    assert "stranger" not in str(caught.value)
