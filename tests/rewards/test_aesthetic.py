import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel, AutoProcessor

from flowcorr.errors import ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import Aesthetic

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 40, 24, 3), dtype=np.uint8)
PROMPTS = [Prompt(text="anything")] * 4


class PublishedHead(nn.Module):
    """The published architecture, narrower: dropout lies at the places 1, 3 and 5 of its sequence."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 24),
            nn.Dropout(0.2),
            nn.Linear(24, 12),
            nn.Dropout(0.2),
            nn.Linear(12, 8),
            nn.Dropout(0.1),
            nn.Linear(8, 4),
            nn.Linear(4, 1),
        )


def make_head(width=16):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PublishedHead(width).eval()


@pytest.fixture(scope="module")
def head_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "aesthetic.safetensors"
    save_file(make_head().state_dict(), path)
    return str(path)


def test_scores_are_those_of_the_published_head(clip_folder, head_file):
    model, processor = (
        AutoModel.from_pretrained(clip_folder),
        AutoProcessor.from_pretrained(clip_folder, backend="pil"),
    )
    inputs = processor(images=[Image.fromarray(image) for image in IMAGES], return_tensors="pt")
    with torch.no_grad():
        features = model.get_image_features(**inputs).pooler_output
        expected = make_head().layers(features / features.norm(dim=-1, keepdim=True))[:, 0]
    output = Aesthetic(head=head_file, path=clip_folder, device="cpu", batch_size=3)(IMAGES, PROMPTS)
    np.testing.assert_allclose(output.scores, expected.double().numpy(), rtol=1e-4, atol=1e-6)
    assert np.ptp(output.scores) > 1e-3


def test_paths_may_begin_at_the_home_folder(clip_folder, head_file, monkeypatch):
    expected = Aesthetic(head=head_file, path=clip_folder, device="cpu")(IMAGES, PROMPTS)
    monkeypatch.setenv("HOME", "/")  # both paths begin with a slash
    reward = Aesthetic(head=f"~{head_file}", path=f"~{clip_folder}", device="cpu")
    assert reward(IMAGES, PROMPTS).scores == pytest.approx(expected.scores)


def test_the_prompt_does_not_matter(clip_folder, head_file):
    reward = Aesthetic(head=head_file, path=clip_folder, device="cpu")
    other = [Prompt(text="other")] * 4
    np.testing.assert_array_equal(reward(IMAGES, PROMPTS).scores, reward(IMAGES, other).scores)
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_pickle_is_refused_with_the_conversion(clip_folder, tmp_path):
    path = tmp_path / "head.pth"
    torch.save(make_head().state_dict(), path)
    with pytest.raises(ConfigError, match=f"head='{path}' .*weights_only=True"):
        Aesthetic(head=str(path), path=clip_folder)


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "No such file"), (b"\x00" * 100, "deserializing")],
    ids=["missing", "damaged"],
)
def test_missing_and_damaged_files_are_named(clip_folder, tmp_path, content, named):
    head = tmp_path / "head.safetensors"
    if content is not None:
        head.write_bytes(content)
    with pytest.raises(ConfigError, match=f"head='{head}' .*{named}"):
        Aesthetic(head=str(head), path=clip_folder)


@pytest.mark.parametrize("option", ["head", "path", "device"])
def test_texts_are_told_from_other_values(clip_folder, head_file, option):
    with pytest.raises(ConfigError, match=f"^reward aesthetic: {option}=<NoneType> "):
        Aesthetic(**{"head": head_file, "path": clip_folder, option: None})


def test_head_for_another_clip_is_refused(clip_folder, tmp_path):
    path = str(tmp_path / "wide.safetensors")
    save_file(make_head(768).state_dict(), path)
    with pytest.raises(ConfigError, match=f"head='{path}' .* 768, .*path='{clip_folder}' .* 16;"):
        Aesthetic(head=path, path=clip_folder)


@pytest.mark.parametrize(
    "tensors",
    [
        {"weight": torch.zeros(1, 16)},
        {"layers.0.weight": torch.zeros(1, 16)},
        {"layers.0.weight": torch.zeros(2, 16), "layers.0.bias": torch.zeros(2)},
        {
            "layers.0.weight": torch.zeros(4, 16),
            "layers.0.bias": torch.zeros(4),
            "layers.1.weight": torch.zeros(1, 5),
            "layers.1.bias": torch.zeros(1),
        },
    ],
    ids=["names", "no bias", "two outputs", "broken chain"],
)
def test_other_tensors_are_refused(clip_folder, tmp_path, tensors):
    path = str(tmp_path / "other.safetensors")
    save_file(tensors, path)
    with pytest.raises(
        ConfigError, match=rf"head='{path}' .*<i>\.weight .*<i>\.bias .* {next(iter(tensors))} \["
    ):
        Aesthetic(head=path, path=clip_folder)
