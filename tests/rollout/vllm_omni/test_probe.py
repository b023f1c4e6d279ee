"""The probe's verdict on two velocities."""

import pytest
import torch

from flowcorr.errors import BackendError
from flowcorr.rollout.vllm_omni.probe import MoveCheck, Velocities, actor_probe, actor_velocity, untrained

FLOAT32 = {"rounding": 2e-6, "largest_gap": 5e-4}
BFLOAT16 = {"rounding": 0.01, "largest_gap": 0.034}


def velocities(engine, actor):
    return Velocities(engine=torch.tensor(engine), actor=torch.tensor(actor))


def test_a_move_must_be_the_actors():
    start = velocities([1.0, 0.0], [1.0, 0.0])
    assert MoveCheck(start, **FLOAT32).contradiction(velocities([1.0, 0.1], [1.0, 0.1])) is None
    for engine in ([1.0, 0.0], [1.0, -0.1], [1.0, 0.3]):
        assert MoveCheck(start, **FLOAT32).contradiction(velocities(engine, [1.0, 0.1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_velocities_that_are_not_finite_are_no_lost_sync(bad):
    start, broken = velocities([1.0, 0.0], [1.0, 0.0]), velocities([1.0, bad], [1.0, 0.1])
    with pytest.raises(BackendError, match="engine's velocity "):
        MoveCheck(start, **FLOAT32).contradiction(broken)
    with pytest.raises(BackendError, match="actor's velocity "):
        MoveCheck(velocities([1.0, 0.0], [bad, 0.0]), **FLOAT32)


def test_moves_within_the_noise_add_up_until_they_prove_something():
    checked = MoveCheck(velocities([1.0, 0.01], [1.0, 0.0]), **BFLOAT16)
    for step in (0.01, 0.02, 0.03):  # an engine that never moves
        assert checked.contradiction(velocities([1.0, 0.01], [1.0, step])) is None
    assert checked.contradiction(velocities([1.0, 0.01], [1.0, 0.05]))


def test_after_a_conclusive_move_the_next_is_counted_from_there():
    for first in ([1.0, 0.5], [1.0, 0.0]):  # that arrived, or did not
        checked = MoveCheck(velocities([1.0, 0.0], [1.0, 0.0]), **FLOAT32)
        checked.contradiction(velocities(first, [1.0, 0.5]))
        assert checked.contradiction(velocities(first, [1.0, 0.55]))
        assert checked.contradiction(velocities([first[0], first[1] + 0.05], [1.0, 0.6])) is None


def test_another_model_is_told_apart_before_training():
    with pytest.raises(BackendError, match=r" 141%: .*model\.path"):
        MoveCheck(velocities([0.0, 1.0], [1.0, 0.0]), **BFLOAT16)


def test_a_gap_that_precision_does_not_explain_hides_no_lost_sync():
    checked = MoveCheck(velocities([1.0, 0.2], [1.0, 0.0]), **FLOAT32)
    assert checked.contradiction(velocities([1.0, 0.2], [1.0, 0.01]))


def rotated(tensors, seed):
    """The same adapter, computed otherwise: `B A = (B R) (R^T A)`, each rounded."""
    changed = dict(tensors)
    for name, down in tensors.items():
        if ".lora_A." in name:
            draw = torch.Generator().manual_seed(seed)
            rotation, _ = torch.linalg.qr(torch.randn(len(down), len(down), generator=draw))
            other = name.replace(".lora_A.", ".lora_B.")
            changed[name] = (rotation.T @ down.float()).to(down)
            changed[other] = (tensors[other].float() @ rotation).to(tensors[other])
    return changed


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moves_of_the_size_of_rounding_are_no_lost_syncs(guidance, dtype, make_run):
    """With B = 0 both stacks round alike to the bit, and with any adapter they do not."""
    run = make_run(
        path="tiny_ocr",
        model={"dtype": dtype},
        rollout={"dtype": dtype},
        sampling={"guidance_scale": guidance},
    )
    tensors = run.actor.weights.snapshot().tensors
    probe = actor_probe(run.family, run.config, tensors)
    numbers = {"rounding": probe.rounding, "largest_gap": probe.largest_gap}
    start = Velocities(engine=probe.start, actor=probe.start)
    checked, lost, seen = MoveCheck(start, **numbers), MoveCheck(start, **numbers), []
    for seed, scale in enumerate((1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2)):
        draw = torch.Generator().manual_seed(10 + seed)
        moved = {
            name: scale * torch.randn(value.shape, generator=draw).to(value) if ".lora_B." in name else value
            for name, value in tensors.items()
        }
        actor, engine = (
            actor_velocity(run.family, weights, probe.point) for weights in (moved, rotated(moved, seed))
        )
        assert checked.contradiction(Velocities(engine=engine, actor=actor)) is None
        size = Velocities(engine=actor, actor=probe.start).gap()
        seen.append((size, lost.contradiction(Velocities(engine=probe.start, actor=actor)) is not None))
    assert [told for size, told in seen if size > 4 * probe.rounding][0]  # noqa: RUF015
    assert not any(told for size, told in seen if size < 2 * probe.rounding)


def test_an_untrained_adapter_has_no_effect():
    tensors = {"x.lora_A.default.weight": torch.ones(2, 2), "x.lora_B.default.weight": torch.ones(2, 2)}
    still = untrained(tensors)
    assert still["x.lora_A.default.weight"].all()
    assert not still["x.lora_B.default.weight"].any()
