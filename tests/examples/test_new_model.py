"""The guide's family agrees with its pipeline, trains, and is what errors point to."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_pipelines import LONGCAT_IMAGE_SIZE, build_tiny_longcat_image, connect, overrides, stir

from flowcorr.config import ModelConfig
from flowcorr.errors import ConfigError
from flowcorr.models import DTYPES, load_family
from flowcorr.records import ActorBatch
from flowcorr.rollout import decode
from flowcorr.trackers.jsonl import read_metrics
from tests.models.learning import load_adapter
from tests.tolerances import LOG_PROBS, MEANS

EXAMPLES = Path(__file__).parents[2] / "examples"
HEIGHT, WIDTH = LONGCAT_IMAGE_SIZE


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(build_tiny_longcat_image(tmp_path_factory.mktemp("longcat_image")))


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import new_model

    yield new_model
    sys.modules.pop("new_model")


def test_the_check_agrees_with_the_pipeline(example, path):
    result = example.check(path, height=HEIGHT, width=WIDTH)
    assert result.differences == ()
    assert result.guided
    assert result.velocity_gap < 1e-4


def test_the_check_finds_a_mistake(example, path, monkeypatch):
    right = example.LongCatImage.schedule
    monkeypatch.setattr(
        example.LongCatImage, "schedule", lambda self, steps, shape: right(self, steps + 1, shape)
    )
    parts = [difference.part for difference in example.check(path, height=HEIGHT, width=WIDTH).differences]
    assert parts == ["schedule"]


def test_decode_is_the_pipelines_own(example, path):
    family = load_family(ModelConfig(path=path, family="new_model:LongCatImage"))
    pipe, shape = family.pipeline, family.latent_shape(HEIGHT, WIDTH)
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    # The pipeline's own unpacking, which only its `__call__` uses.
    unpacked = pipe._unpack_latents(latents.flatten(1, 2), HEIGHT, WIDTH, pipe.vae_scale_factor)
    with torch.no_grad():
        pixels = pipe.vae.decode(
            unpacked / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        ).sample
    expected = pipe.image_processor.postprocess(pixels, output_type="np") * 255
    got, finite = decode(family, latents)
    assert got.shape == (2, HEIGHT, WIDTH, 3)
    assert finite.all()
    assert abs(got.numpy() - expected).max() <= 0.51


def test_it_trains_and_its_adapter_loads(example, path, make_config, tmp_path):
    config = make_config(
        model={"path": path, "family": "new_model:LongCatImage", "max_sequence_length": 16},
        sampling={"height": HEIGHT, "width": WIDTH, "guidance_scale": 3.0},
        rollout={"prompts_per_step": 2, "n": 2},
        actor={"mini_batches": 1},
    )
    family, actor, engine, conditioning = connect(config, ["cat", "two dogs"])
    rollout = engine.sample(conditioning, [0, 1], training_step=1, with_means=False)
    old = actor.log_probs(rollout).log_probs
    torch.testing.assert_close(old, rollout.log_probs, **LOG_PROBS)
    batch = ActorBatch(rollout=rollout, advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]), old_log_probs=old)
    assert (
        actor.update(batch, actor.config.algorithm.rollout_correction, training_step=1).metrics.compute()[
            "actor/grad_norm"
        ]
        > 0
    )
    stir(actor)
    actor.weights.save(tmp_path)
    fresh = load_family(ModelConfig(path=path, family="new_model:LongCatImage", max_sequence_length=16))
    load_adapter(fresh.pipeline, tmp_path)
    inputs = (
        rollout.window.latents[:, 0],
        rollout.window.timesteps[:, 0],
        rollout.sample_conditioning(),
        actor.guidance,
    )
    with torch.no_grad():
        trained = family.velocity(family.transformer, *inputs)
        torch.testing.assert_close(fresh.velocity(fresh.transformer, *inputs), trained, **MEANS)


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("auto", r"LongCatImagePipeline.*FluxPipeline.*examples/new_model\.py"),
        ("aura", r"model\.family='aura' .*qwen_image.*examples/new_model\.py"),
        ("no_such_module:LongCatImage", "'no_such_module'.*PYTHONPATH"),
        ("new_model:Aura", "'Aura'; name a ModelFamily"),
        ("new_model:check", r"ModelFamily; examples/new_model\.py"),
    ],
)
def test_a_name_of_no_family_is_an_error_that_points_to_the_guide(example, path, family, named):
    with pytest.raises(ConfigError, match=named):
        load_family(ModelConfig(path=path, family=family))


def test_the_guide_is_short():
    source = (EXAMPLES / "new_model.py").read_text(encoding="utf-8")
    adapter = source.partition("class LongCatImage")[2].partition("\n\n\n")[0]
    assert len(adapter.splitlines()) <= 60


@pytest.mark.vllm_omni
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains_with_the_engine_from_a_file_beside_the_recipe(dtype, tmp_path):
    """Doctor and two training steps in an empty folder, by the command."""
    shutil.copy(EXAMPLES / "new_model.py", tmp_path)
    folder = build_tiny_longcat_image(tmp_path / "model", DTYPES[dtype])
    keys = [
        *overrides(folder, LONGCAT_IMAGE_SIZE, dtype),
        "model.family=new_model:LongCatImage",
        "rollout.name=vllm_omni",
        "rollout.emulate=none",
        "trainer.total_steps=2",
        "trainer.doctor=true",
    ]
    command = [sys.executable, "-m", "flowcorr", "train", "tiny_jpeg_lora", *keys, "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "actor/updates" in row]
    gaps = [row["rollout_corr/logprob_abs_diff_mean"] for row in rows]
    assert len(gaps) == 2
    assert max(gaps) <= (1e-6 if dtype == "float32" else 1e-4)
