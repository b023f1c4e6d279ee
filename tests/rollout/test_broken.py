"""Decoders that overflow, of the classes and in the dtypes of real ones, leave no picture behind."""

import pytest
import torch
from tiny_pipelines import PIPELINES

from flowcorr.config import ModelConfig
from flowcorr.config.rollout import RolloutConfig
from flowcorr.config.schema import Config
from flowcorr.models import DTYPES, load_family
from flowcorr.rollout import decode
from flowcorr.rollout.broken import find_broken
from flowcorr.rollout.precision import decoder_dtype
from flowcorr.rollout.sampler import MISSING
from tests.overflow import overflow, overflow_one


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: str(tiny.build(folder / name)) for name, tiny in PIPELINES.items()}


def loaded(paths, name, dtype, samples=3):
    family = load_family(ModelConfig(path=paths[name], dtype=dtype), text_encoders=False)
    draw = torch.Generator().manual_seed(0)
    tiny = PIPELINES[name]
    return family, torch.randn(samples, *family.sample_shape(*tiny.size, tiny.frames), generator=draw)


@torch.no_grad()
@pytest.mark.parametrize("layer", ["conv_in", "conv_out"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", PIPELINES)
def test_a_decoder_that_overflows_leaves_no_picture(paths, name, dtype, layer):
    family, latents = loaded(paths, name, dtype)
    assert decode(family, latents)[1].tolist() == [True] * 3
    overflow(family.pipeline.vae, layer)
    images, finite = decode(family, latents)
    assert finite.tolist() == [False] * 3
    assert (images == torch.tensor(MISSING)).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", PIPELINES)
def test_one_image_of_a_batch_may_overflow_alone(paths, name, dtype):
    family, latents = loaded(paths, name, dtype)
    place = overflow_one(family, latents)
    images, finite = decode(family, latents)
    assert (~finite).nonzero().flatten().tolist() == [place]
    missing = (images == torch.tensor(MISSING)).flatten(1).all(1)
    assert missing.nonzero().flatten().tolist() == [place]


def test_latents_come_before_pixels():
    latents = torch.zeros(4, 2, 3)
    latents[1, 0, 0], latents[3, 1, 2] = torch.nan, torch.inf
    images = torch.tensor([True, False, False, True])
    keys = {"samples_in": "rollout.dtype=float16", "decodes_in": "model.dtype=bfloat16"}
    broken = find_broken([torch.zeros(4, 5), latents], images, **keys)
    assert sorted(broken) == [1, 2, 3]
    assert all("overflow in rollout.dtype=float16" in broken[place] for place in (1, 3))
    assert "overflow even in model.dtype=bfloat16" in broken[2]  # its range is that of float32


def test_the_decoder_is_that_of_the_process_that_samples():
    rollout, model = RolloutConfig(dtype="float16"), ModelConfig(dtype="bfloat16")
    assert decoder_dtype(Config(model=model, rollout=rollout)) == "model.dtype=bfloat16"
    vllm_omni = RolloutConfig(dtype="float16", name="vllm_omni")
    assert decoder_dtype(Config(model=model, rollout=vllm_omni)) == "rollout.dtype=float16"
