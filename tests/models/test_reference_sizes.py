"""Reference images of unequal sizes in one batch: each prompt is read, drawn and trained on as it is alone."""

import importlib.util
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pipelines import FAMILIES, overrides

from flowcorr.config import ModelConfig, load
from flowcorr.data import read_prompts
from flowcorr.models import Guidance, load_family
from flowcorr.rollout import sample_ode
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import train
from tests.tolerances import LATENTS, MEANS

IMAGES = {"flux_kontext": 1, "flux2_klein": 2, "qwen_image_edit": 1, "qwen_image_edit_plus": 2}
SIZES = {"cat": ((64, 64), (40, 96)), "two dogs": ((40, 96), (130, 50)), "red hat": ((200, 90), (16, 16))}
"""Height and width of the reference images of each prompt; of the first alone, where a model takes one."""
GUIDANCE = Guidance(guidance_scale=3.0, true_cfg_scale=3.0, negative_prompt="bad")


@pytest.fixture(scope="module", params=IMAGES)
def name(request):
    if request.param.startswith("qwen") and importlib.util.find_spec("torchvision") is None:
        pytest.skip("its processor needs torchvision")
    return request.param


@pytest.fixture(scope="module")
def path(name, tmp_path_factory):
    return FAMILIES[name].build(tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def file(name, tmp_path_factory):
    """A file of prompts and one of held-out prompts, beside the images that they name."""
    folder = tmp_path_factory.mktemp("prompts")
    draw, lines = np.random.default_rng(0), []
    for place, (text, sizes) in enumerate(SIZES.items()):
        images = [f"{place}_{number}.png" for number in range(IMAGES[name])]
        for image, (height, width) in zip(images, sizes[: len(images)], strict=True):
            coarse = Image.fromarray(draw.integers(0, 256, (5, 7, 3), dtype=np.uint8))
            coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / image)
        lines.append(json.dumps({"prompt": text, "images": images}))
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    (folder / "heldout.jsonl").write_text(lines[1].replace("two dogs", "three dogs"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def prompts(file):
    return read_prompts(file)


@pytest.fixture(scope="module")
def family(name, path):
    model = ModelConfig(path=str(path), max_sequence_length=96)
    return load_family(model, reference_size=FAMILIES[name].size)


def drawn(family, conditioning, noise):
    """Latents at the end of two steps."""
    return sample_ode(
        lambda latents, timesteps: family.velocity(
            family.transformer, latents, timesteps, conditioning, GUIDANCE
        ),
        noise,
        family.schedule(2, tuple(noise.shape[1:])),
    )


@torch.no_grad()
def test_a_prompt_is_read_and_drawn_as_it_is_alone(name, family, prompts):
    shape = family.latent_shape(*FAMILIES[name].size)
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).repeat(len(prompts), *[1] * 3)
    together = family.encode(prompts, GUIDANCE)
    latents = drawn(family, together, noise)
    for row, prompt in enumerate(prompts):
        alone = family.encode([prompt], GUIDANCE)
        assert alone.keys() == together.keys()
        for key, value in alone.items():
            torch.testing.assert_close(together[key][row : row + 1], value, **MEANS)
        torch.testing.assert_close(latents[row : row + 1], drawn(family, alone, noise[:1]), **LATENTS)
    # Images differ by far more than the tolerance, so that none stands for another.
    assert together["references"].std(0).mean() > 1e-3


def test_two_training_steps(name, path, file, tmp_path):
    """All prompts in one micro-batch, scored by the trainer as they were sampled."""
    config = load(
        "flux_kontext_edit_lora",
        [
            *overrides(path, FAMILIES[name].size, "float32"),
            "rollout.name=in_process",
            "rollout.engine={}",
            "rollout.prompts_per_step=3",
            "rollout.n=2",
            "rollout.batch_size=6",
            "actor.mini_batches=1",
            "actor.micro_batch_size=6",
            "sampling.guidance_scale=1",
            *(f"sampling.{key}={value}" for key, value in FAMILIES[name].guidance.items()),
            "sampling.num_inference_steps=3",
            "sampling.sde_window_size=1",
            "sampling.sde_window_range=[0,2]",
            f"data.path={file}",
            f"data.heldout_path={file.with_name('heldout.jsonl')}",
            "data.num_heldout=1",
            "trainer.total_steps=2",
            "trainer.eval_num_inference_steps=2",
        ],
    )
    assert train(config, tmp_path).step == 2
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "reward/mean" in record]
    assert len(records) == 2
    for record in records:
        assert all(math.isfinite(value) for value in record.values())
        assert record["actor/grad_norm"] > 0
        assert record["rollout_corr/logprob_abs_diff_mean"] < 1e-5
