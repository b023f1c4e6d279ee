"""Faults of the table in a stack: what names each, and the smallest size that is named."""

import pytest

from flowcorr.errors import BackendError, ConfigError
from tests.conftest import small_config
from tests.planted.stand_in import Bench, drill
from tests.planted.table import FAULTS

pytestmark = pytest.mark.system

SAMPLING = {
    "height": 32,
    "width": 64,
    "num_inference_steps": 5,
    "sde_window_range": (1, 3),
    "sde_window_size": 1,
}
ROW = {fault.name: fault for fault in FAULTS}


def config(**sections):
    data = {"num_train": 4}
    return small_config(**{"sampling": SAMPLING, "data": data, **sections})


@pytest.fixture(scope="module")
def bench():
    return Bench(config(rollout={"name": "vllm_omni", "n": 8}), num_prompts=2, float32=None)


def test_another_engine_is_replaced_by_one_in_process_of_its_precision(bench):
    rollout = bench.config.rollout
    assert (rollout.name, rollout.placement, rollout.n, rollout.emulate) == ("in_process", "local", 2, "none")
    coarse = config(rollout={"name": "vllm_omni", "engine": {"quantization": "fp8"}})
    assert Bench(coarse, num_prompts=2, float32=None).config.rollout.emulate == "fp8"
    for trainer, emulated in (("int8", "int8"), ("nf4", "int4")):  # the next coarser one
        apart = config(model={"quantization": trainer}, rollout={"name": "vllm_omni"})
        found = Bench(apart, num_prompts=2, float32=None).config
        assert (found.model.quantization, found.rollout.emulate) == ("none", emulated)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("noise_uniform", "noise"),
        ("sync_ignored", "lora"),
        ("version_plus_one", "sync"),
        ("images_bgr", "images"),
        ("prompts_blank_first", "path"),
        ("prompts_blank_after", "path"),
        ("unseeded", "determinism"),
        ("embeddings_noisy", "weights"),
        ("initial_noise", "path"),
    ],
)
def test_a_fault_is_named_by_the_part_that_has_it(bench, name, check):
    (drilled,) = drill(bench, [ROW[name]])
    assert drilled.named_by == check
    assert (drilled.fault, drilled.unseen) == (ROW[name], None)


def test_smaller_faults_are_tried_until_one_is_not_named(bench):
    (drilled,) = drill(bench, [ROW["images_brighter"]])
    assert drilled.named_by == "images"
    assert drilled.smallest / drilled.unseen == pytest.approx(4)
    assert drilled.smallest < ROW["images_brighter"].size


def test_a_fault_that_a_run_cannot_have_is_left_out(bench):
    assert list(drill(bench, [ROW["guidance_off"]])) == []


def test_a_stack_that_is_broken_already_is_not_drilled(bench, monkeypatch):
    true = bench._engine
    monkeypatch.setattr(bench, "_engine", lambda plant: true(ROW["log_probs_summed"].plant(0.0)))
    with pytest.raises(BackendError, match="without .* doctor .*log_probs"):
        next(drill(bench))


def test_one_prompt_is_too_few(tmp_path):
    for name in ("train.txt", "heldout.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    data = {"path": str(tmp_path / "train.txt"), "heldout_path": str(tmp_path / "heldout.txt")}
    with pytest.raises(ConfigError, match=r"data\.path='.*train\.txt' has one "):
        Bench(config(data=data), num_prompts=2, float32=None)


@pytest.mark.slow
def test_every_fault_that_a_run_can_have_is_named(bench):
    unnamed = [drilled.fault.name for drilled in drill(bench) if not drilled.named_by]
    assert unnamed == []
