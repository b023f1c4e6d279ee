"""The doctor on the real engine: silent where it is healthy, and naming each fault that is planted in it."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import tiny_pipelines
import torch

from flowcorr.cli import main
from flowcorr.errors import BackendError
from flowcorr.instruments.doctor import examine
from flowcorr.instruments.page import exit_code
from flowcorr.rollout.vllm_omni import adapter
from flowcorr.rollout.vllm_omni import engine as engine_module
from tests.planted.engine_faults import FAULTS
from tests.planted.real_engine import bench

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]

GUIDED = {"guidance_scale": 3.0, "true_cfg_scale": 1.0}


def check(stack):
    return examine(stack.actor, stack.engine, stack.conditioning)


def finding_of(report, name):
    return next(finding for finding in report.findings if finding.cause == name)


def engine_of(report):
    """The attention and the dtype that the engine says."""
    numbers = finding_of(report, "attention").numbers
    return numbers["engine_attention"], numbers["engine_dtype"]


def test_a_healthy_engine_passes_everything_and_is_left_as_it_was(stack):
    stack.stir()
    stack.sync()
    before = stack.sample()
    report = check(stack)
    assert exit_code(report) == 0
    assert engine_of(report) == ("SDPA", "float32")
    assert max(row["exact_kl"] for row in report.table("noise_floor")) <= 1e-9
    after = stack.sample()
    # Requests that arrive in other batches are computed in other kernels.
    torch.testing.assert_close(after.window.latents, before.window.latents, rtol=0, atol=1e-4)
    assert torch.equal(after.policy_versions, before.policy_versions)


def test_bfloat16_and_staleness_are_no_failure(start):
    stack = start("sd3", dtype="bfloat16", rollout={"staleness": 1}, sampling=GUIDED)
    stack.stir()
    stack.sync()
    history = stack.engine.history
    report = check(stack)
    assert report.causes() == []
    assert engine_of(report) == ("SDPA", "bfloat16")
    assert stack.engine.history == history
    assert stack.sample().policy_versions.unique().tolist() == [0]


def test_the_command_on_a_recipe(tmp_path, capfd):
    folder = tiny_pipelines.build_tiny_qwen_image(tmp_path / "model")
    overrides = tiny_pipelines.overrides(folder, tiny_pipelines.QWEN_SIZE, "float32")
    engine = "rollout.engine.distributed_executor_backend=uni"
    assert main(["doctor", "qwen_image_ocr_lora_rollout_corr", *overrides, engine, "--prompts", "2"]) == 0
    assert "rollout engine and actor agree" in capfd.readouterr().out


# Faults: each changes what the engine is told --------------------------------------------------------------


def plan(**changes):
    """Another way of sampling in every request; `schedule` as a function of the true one."""

    def plant(stack, monkeypatch):
        true = engine_module.Plan
        monkeypatch.setattr(engine_module, "Plan", lambda **fields: true(**{**fields, **new(fields)}))

    def new(fields):
        sampling = {name: value for name, value in changes.items() if name != "schedule"}
        schedule = changes.get("schedule", lambda exact: exact)
        return {
            "sampling": replace(fields["sampling"], **sampling), "schedule": schedule(fields["schedule"])
        }  # fmt: skip

    return plant


def fewer_steps(stack, monkeypatch):
    schedule = stack.family.schedule(
        stack.config.sampling.num_inference_steps - 1, stack.engine.plan.latent_shape
    )
    plan(schedule=lambda exact: schedule)(stack, monkeypatch)


def prompts_mixed_up(stack, monkeypatch):
    generate, count = stack.engine.client.generate, stack.config.rollout.n

    def mixed(requests, **options):
        prompts = [prompt for prompt, _ in requests]
        rolled = prompts[count:] + prompts[:count]
        swapped = [(prompt, params) for prompt, (_, params) in zip(rolled, requests, strict=True)]
        return generate(swapped, **options)

    monkeypatch.setattr(stack.engine.client, "generate", mixed)


def weights(change):
    """Other weights than those that are synced. The engine's own check compares with the changed ones."""

    def plant(stack, monkeypatch):
        sync = stack.engine.sync
        monkeypatch.setattr(
            stack.engine,
            "sync",
            lambda weights: sync(replace(weights, tensors=change(weights.tensors))),
        )

    return plant


def scaled(tensors):
    return {name: tensor / 2 if ".lora_B." in name else tensor for name, tensor in tensors.items()}


def half_of_the_layers(tensors):
    return {
        name: tensor if ".to_q." in name or ".to_v." in name else torch.zeros_like(tensor)
        for name, tensor in tensors.items()
    }


def one_sync_late():
    seen: list[Mapping[str, torch.Tensor]] = []

    def late(tensors):
        seen.append(tensors)
        return seen[-2] if len(seen) > 1 else tensors

    return late


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (plan(guidance_scale=1.0), "guidance"),
        (plan(guidance_scale=5.0), "guidance"),
        (plan(noise_level=0.9), "transition"),
        (fewer_steps, "schedule"),
        (prompts_mixed_up, "embeddings"),
        (weights(scaled), "lora"),
        (weights(half_of_the_layers), "lora"),
        (weights(one_sync_late()), "sync"),
    ],
)
def test_a_planted_fault_is_named_and_no_other(guided, plant, named, monkeypatch):
    plant(guided, monkeypatch)
    report = check(guided)
    assert report.causes() == [named]


def test_an_adapter_that_does_not_arrive_ends_in_an_error(guided, monkeypatch):
    old = adapter.peft_tensors(guided.actor.weights.snapshot().tensors, ("", ""))
    monkeypatch.setattr(adapter, "peft_tensors", lambda tensors, layer_suffix: old)
    with pytest.raises(BackendError, match="effect: .*weight_sync="):
        check(guided)


def test_another_checkpoint_ends_in_an_error(start, monkeypatch, tmp_path):
    other = tiny_pipelines.build_tiny_sd3(tmp_path / "other", seed=1)
    monkeypatch.setattr(engine_module, "resolve_path", lambda path: str(other))
    with pytest.raises(BackendError, match=r" \d+%: .*model\.path"):
        start("sd3")


# Planted in the engine's process ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def editing():
    """A FLUX.2 klein that reads prompts and reference images closely, in which faults come and go."""
    with bench("flux2_klein", "float32", 3.0, 0, seed=3) as started:
        yield started


def test_an_editing_model_is_healthy(editing):
    assert editing.named(None).doctor == ""


@pytest.mark.parametrize(
    ("name", "size", "named"),
    [
        ("references_missing", None, "references"),
        ("references_of_another", None, "references"),
        ("references_bgr", None, "references"),
        ("references_misplaced", None, "references"),
        ("references_scaled", 0.1, "references"),
        ("references_noisy", 0.1, "references"),
        ("negative_of_another", None, "guidance"),
        ("negative_empty", None, "guidance"),
        ("guidance_exchanged", None, "guidance"),
        ("one_image_of_another", None, "embeddings"),
        ("velocity_of_members", 0.05, "weights"),
        ("first_repeated", None, "samples"),
    ],
)
def test_a_fault_of_prompts_references_or_single_samples_is_named(editing, name, size, named):
    fault = next(fault for fault in FAULTS if fault.name == name)
    assert editing.named(fault, size or 0.0).doctor == named
