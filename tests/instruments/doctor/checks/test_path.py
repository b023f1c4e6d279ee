"""The steps outside the window: silent under rounding, and each fault of all samples alike."""

from dataclasses import replace

import pytest
import torch
from instruments.doctor.faults import assert_named, check, finding_of, separate

from tests.planted.plants import at_steps, blanked, returning, scheduled, with_timesteps

BF16 = {
    "model": {"dtype": "bfloat16", "path": "tiny_ocr"},
    "rollout": {"dtype": "bfloat16", "n": 4},
    "sampling": {
        "guidance_scale": 4.0, "height": 32, "width": 64, "num_inference_steps": 6, "sde_window_range": (1, 4)
    },
}  # fmt: skip


def longer(share):
    """Steps after the window that are too long by this share."""

    def change(rollout):
        before = rollout.window.next_latents[:, -1]
        return before + (1 + share) * (rollout.final_latents - before)

    return returning(final_latents=change)


@pytest.mark.parametrize(("share", "failed"), [(0.0, []), (0.02, ["path"])])
def test_a_share_of_the_way_is_seen_beside_rounding(small_run, share, failed):
    run = small_run(**BF16)
    engine = separate(run)
    longer(share)(engine)
    assert check(run, engine, float32=False).causes() == failed


def test_blank_prompts_after_the_window(small_run):
    run = small_run(**BF16)
    engine = separate(run)
    at_steps(lambda engine: range(4, 6), blanked)(engine)
    assert_named(check(run, engine, float32=False), "path", leg="after the window")


def test_steps_that_few_samples_take_are_judged_by_these(small_run):
    """Windows at the last step leave nothing after them, here in six of eight samples."""
    sampling = {
        "num_inference_steps": 4,
        "sde_window_range": (2, 4),
        "sde_window_size": 1,
        "window_per": "sample",
    }
    run = small_run(trainer={"seed": 1}, rollout={"n": 4}, sampling=sampling)
    engine, shares = separate(run), []

    def elsewhere(rollout):
        before = rollout.window.next_latents[:, -1]
        ends = (rollout.window.step_indices[:, -1] == 3)[:, None, None, None]
        shares.append(float(ends.double().mean()))
        return torch.where(ends, rollout.final_latents, before + (rollout.final_latents - before).roll(1, -1))

    returning(final_latents=elsewhere)(engine)
    found = finding_of(check(run, engine, float32=False), "path")
    assert shares[0] == 0.75
    assert (found.level, found.numbers["leg"]) == ("serious", "after the window")


def test_timesteps_made_in_another_order_hide_no_fault_of_the_path(small_run):
    run = small_run()
    engine = separate(run)
    scheduled(with_timesteps(lambda timesteps: timesteps * (1 + 2**-23)))(engine)
    assert finding_of(check(run, engine), "path").level == "healthy"
    longer(0.02)(engine)
    assert "path" in check(run, engine).causes()


def test_a_window_over_the_whole_schedule_leaves_no_step(small_run):
    run = small_run(sampling={"num_inference_steps": 2, "sde_window_range": (0, 2), "sde_window_size": 2})
    engine = separate(run)
    assert finding_of(check(run, engine), "path").level == "note"


def test_an_engine_without_final_latents_is_examined_before_its_window(small_run):
    run = small_run()
    engine = separate(run)
    sample = engine.sample
    engine.sample = lambda *given, **options: replace(sample(*given, **options), final_latents=None)
    report = check(run, engine)
    assert report.causes() == []
    assert finding_of(report, "images").level == "note"
    assert torch.isfinite(torch.tensor(finding_of(report, "path").numbers.get("value", 0.0)))
