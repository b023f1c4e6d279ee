"""The probe's verdict on two velocities."""

from dataclasses import replace

import pytest
import torch

from flowcorr.config.schema import Config, ModelConfig, RolloutConfig
from flowcorr.errors import BackendError
from flowcorr.rollout.vllm_omni.probe import MoveCheck, Velocities, disagreement, untrained


def of_engine(**options):
    return Config(rollout=RolloutConfig(name="vllm_omni", **options))


FLOAT32, BFLOAT16 = (disagreement(of_engine(dtype=dtype)) for dtype in ("float32", "bfloat16"))


def velocities(engine, actor):
    return Velocities(engine=torch.tensor(engine), actor=torch.tensor(actor))


def test_a_move_must_be_the_actors():
    start = velocities([1.0, 0.0], [1.0, 0.0])
    MoveCheck(start, disagreement=FLOAT32).check(velocities([1.0, 0.1], [1.0, 0.1]))
    for engine in ([1.0, 0.0], [1.0, -0.1], [1.0, 0.3]):
        with pytest.raises(BackendError, match="did not take effect"):
            MoveCheck(start, disagreement=FLOAT32).check(velocities(engine, [1.0, 0.1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_velocities_that_are_not_finite_are_no_lost_sync(bad):
    start, broken = velocities([1.0, 0.0], [1.0, 0.0]), velocities([1.0, bad], [1.0, 0.1])
    with pytest.raises(BackendError, match="the engine's velocity is not finite"):
        MoveCheck(start, disagreement=FLOAT32).check(broken)
    with pytest.raises(BackendError, match="the actor's velocity is not finite"):
        MoveCheck(velocities([1.0, 0.0], [bad, 0.0]), disagreement=FLOAT32)


def test_moves_within_the_noise_add_up_until_they_prove_something():
    checked = MoveCheck(velocities([1.0, 0.01], [1.0, 0.0]), disagreement=BFLOAT16)
    for step in (0.01, 0.02, 0.03):
        checked.check(velocities([1.0, 0.01], [1.0, step]))  # an engine that never moves
    with pytest.raises(BackendError, match="did not take effect"):
        checked.check(velocities([1.0, 0.01], [1.0, 0.05]))


def test_after_a_conclusive_move_the_next_is_counted_from_there():
    checked = MoveCheck(velocities([1.0, 0.0], [1.0, 0.0]), disagreement=FLOAT32)
    checked.check(velocities([1.0, 0.5], [1.0, 0.5]))
    with pytest.raises(BackendError, match="did not take effect"):
        checked.check(velocities([1.0, 0.5], [1.0, 0.55]))


def test_another_model_is_told_apart_before_training():
    with pytest.raises(BackendError, match="different models"):
        MoveCheck(velocities([0.0, 1.0], [1.0, 0.0]), disagreement=BFLOAT16)


def test_disagreement_follows_the_precision():
    kinds = [
        of_engine(),
        of_engine(dtype="bfloat16"),
        of_engine(dtype="bfloat16", engine={"quantization": "fp8"}),
    ]
    most = [disagreement(kind)[1] for kind in kinds]
    assert most == sorted(set(most))
    trainer = replace(of_engine(dtype="bfloat16"), model=ModelConfig(quantization="nf4"))
    assert disagreement(trainer)[1] == most[-1]
    assert FLOAT32[0] < BFLOAT16[0]


def test_kernels_that_agree_at_the_start_may_differ_by_rounding_later():
    for bounds, rounding in ((FLOAT32, 1e-6), (BFLOAT16, 3e-3)):
        checked = MoveCheck(velocities([1.0, 0.0], [1.0, 0.0]), disagreement=bounds)
        checked.check(velocities([1.0 + rounding, 0.0], [1.0, rounding / 4]))
        with pytest.raises(BackendError, match="did not take effect"):
            checked.check(velocities([1.0 + 8 * rounding, 0.0], [1.0, rounding]))


def test_an_untrained_adapter_has_no_effect():
    tensors = {"x.lora_A.default.weight": torch.ones(2, 2), "x.lora_B.default.weight": torch.ones(2, 2)}
    still = untrained(tensors)
    assert still["x.lora_A.default.weight"].all()
    assert not still["x.lora_B.default.weight"].any()
