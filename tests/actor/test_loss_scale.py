from dataclasses import replace

import torch

from flowcorr.actor.loss_scale import PATIENCE, START, LossScale
from flowcorr.config.schema import LoraConfig


def small_run(make_run, dtype):
    run = make_run(
        model={"dtype": dtype, "lora": LoraConfig(rank=4)},
        rollout={"prompts_per_step": 2, "n": 4, "dtype": dtype},
        actor={"mini_batches": 1},
    )
    run.stir()
    return run


def gradient(make_run, dtype, batch, scale=None):
    """Of small advantages, as a vector."""
    run = small_run(make_run, dtype)
    conditioning = {name: rows.to(run.family.dtype) for name, rows in batch.rollout.conditioning.items()}
    rollout = replace(batch.rollout, conditioning=conditioning)
    if scale is not None:
        run.actor.optimizer.loss_scale.value = scale
    run.update(
        replace(
            batch,
            rollout=rollout,
            advantages=2e-4 * batch.advantages,
            old_log_probs=run.actor.log_probs(rollout).log_probs,
        )
    )
    return torch.cat([value.flatten() for value in run.gradient().values()])


def test_it_is_halved_by_an_overflow_and_doubled_after_many_good_gradients():
    scale = LossScale(scales=True)
    scale.observe(finite=False)
    for _ in range(PATIENCE - 1):
        scale.observe(finite=True)
    assert scale.value == START / 2
    resumed = LossScale(scales=True)
    resumed.load_state(scale.state())
    resumed.observe(finite=True)
    assert resumed.value == START


def test_other_precisions_are_not_scaled():
    scale = LossScale(scales=False)
    scale.observe(finite=False)
    assert (scale.value, scale.state()) == (1.0, {})


def test_small_gradients_in_float16_are_those_of_float32(make_run):
    batch = small_run(make_run, "float32").batch()
    exact = gradient(make_run, "float32", batch)
    scaled, unscaled = (gradient(make_run, "float16", batch, scale) for scale in (None, 1.0))
    assert scaled.dtype == torch.float32
    assert (scaled - exact).norm() < 0.03 * exact.norm()
    assert (unscaled - exact).norm() > 0.1 * exact.norm()


def test_an_update_that_overflows_is_skipped_with_a_smaller_scale(make_run, caplog):
    run = small_run(make_run, "float16")
    before = run.actor.weights.snapshot().tensors
    run.actor.optimizer.loss_scale.value = 2.0**100
    metrics = run.update(run.batch()).compute()
    assert metrics["actor/skipped_updates"] == 1
    assert run.actor.optimizer.loss_scale.value == 2.0**99
    assert all(torch.equal(value, before[name]) for name, value in run.actor.weights.parameters.items())
    assert "not finite" in caplog.text
