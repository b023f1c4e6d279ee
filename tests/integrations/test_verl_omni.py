"""Batches of verl-omni; `Proto` stands in for verl's `DataProto`."""

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError, ConfigError
from flowcorr.integrations.verl_omni import correct_batch

LN2 = math.log(2)
SCHEDULE = (1000.0, 944.0, 881.0, 801.0)
ROLLOUT = torch.tensor([[-1.0, -1.5], [-2.0, -1.0], [-1.2, -1.3], [-0.7, -0.9]])
DELTA = torch.tensor([[LN2, 0.0], [LN2, LN2], [-LN2, 0.0], [0.0, 0.0]])
MEANS = {
    "old_prev_sample_mean": torch.zeros(4, 2, 3, 5),
    "rollout_prev_sample_mean": torch.full((4, 2, 3, 5), 0.1),
}
SUM = {"rollout_is": "token", "rollout_is_threshold": 10.0, "log_ratio_scale": "sum"}


@dataclass
class Proto:
    """What verl's DataProto is made of."""

    batch: TensorDict
    non_tensor_batch: dict = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)


def tensors(**others):
    return {"old_log_probs": ROLLOUT + DELTA, "rollout_log_probs": ROLLOUT.clone()} | others


def tensor_dict(**others):
    return TensorDict(tensors(**others), batch_size=[4])


def proto(**others):
    return Proto(
        tensor_dict(**others), {"uid": np.array(["a", "a", "b", "b"], dtype=object)}, {"global_steps": 3}
    )


def data_proto(**others):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        protocol = pytest.importorskip("verl.protocol", reason="verl is not installed")
    given = proto(**others)
    return protocol.DataProto(given.batch, given.non_tensor_batch, given.meta_info)


@pytest.mark.parametrize("make", [tensors, tensor_dict, proto, data_proto])
def test_sequence_weights_in_every_container(make):
    batch = make(advantages=torch.ones(4, 2))
    corrected, metrics = correct_batch(batch, RolloutCorrectionConfig.seq_is(threshold=3.0))
    assert type(corrected) is type(batch)
    before, after = (getattr(given, "batch", given) for given in (batch, corrected))
    expected = torch.tensor([2.0, 3.0, 0.5, 1.0])  # exp of the sums ln 2, 2 ln 2 (capped), -ln 2, 0
    torch.testing.assert_close(after["rollout_is_weights"], expected[:, None].expand(4, 2))
    assert set(after.keys()) == {*before.keys(), "rollout_is_weights"}
    assert all(after[name] is before[name] for name in tensors())
    if make in (proto, data_proto):
        assert corrected.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
        assert corrected.meta_info == {"global_steps": 3}
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(6.5 / 4)
    assert metrics["rollout_corr/kl"] == pytest.approx(-2 * LN2 / 8)


@pytest.mark.parametrize(("denominator", "factor"), [("all", 1.0), ("kept", 8 / 6)])
def test_rejection_is_a_weight_of_zero(denominator, factor):
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_rs="seq_sum_k1",
        rollout_rs_threshold=(0.4, 2.5),  # of exp(sum): rejects the second sample, at 4
        rollout_rs_denominator=denominator,
    )
    corrected, metrics = correct_batch(tensors(), config)
    expected = DELTA.exp()
    expected[1] = 0
    torch.testing.assert_close(corrected["rollout_is_weights"], factor * expected)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.25
    # verl-omni's mean over all terms is then the mean over the kept ones, or over all.
    values = torch.arange(8.0).view(4, 2)
    mean = (corrected["rollout_is_weights"] * values).mean()
    assert mean.item() == pytest.approx((expected * values).sum().item() / (6 if factor > 1 else 8))


def test_without_a_correction_weights_are_one_and_metrics_are_there():
    corrected, metrics = correct_batch(tensors(), RolloutCorrectionConfig.disabled())
    assert torch.equal(corrected["rollout_is_weights"], torch.ones(4, 2))
    assert metrics["rollout_corr/logprob_abs_diff_max"] == pytest.approx(LN2)


def test_bypass_takes_the_rollouts_log_probs():
    batch = {"rollout_log_probs": ROLLOUT}
    corrected, metrics = correct_batch(batch, RolloutCorrectionConfig.bypass_ppo_clip())
    assert torch.equal(corrected["old_log_probs"], ROLLOUT)
    assert metrics == {}
    assert "old_log_probs" not in batch


def test_verls_own_keys_are_read():
    section = {"_target_": "verl.trainer.config.algorithm.RolloutCorrectionConfig", "rollout_is": "sequence",
               "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": False, "rollout_rs": "seq_sum_k1",
               "rollout_rs_threshold": "0.4_2.5", "bypass_mode": False, "loss_type": "ppo_clip"}  # fmt: skip
    config = RolloutCorrectionConfig.seq_is_rs(is_threshold=3.0, rs_threshold=2.5, rs_threshold_lower=0.4)
    ours, theirs = (correct_batch(tensors(), given) for given in (config, section))
    assert torch.equal(ours[0]["rollout_is_weights"], theirs[0]["rollout_is_weights"])
    assert ours[1] == theirs[1]


def test_a_mask_and_what_is_not_finite_get_no_weight():
    mask = torch.ones(4, 2)
    mask[0, 1] = 0
    batch = tensors(response_mask=mask)
    batch["old_log_probs"][2, 0] = math.nan
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs_denominator="all")
    corrected, metrics = correct_batch(batch, config)
    expected = DELTA.exp().clamp(max=2)
    expected[0, 1] = expected[2, 0] = 0
    torch.testing.assert_close(corrected["rollout_is_weights"], expected)
    assert metrics["rollout_corr/nonfinite_fraction"] == pytest.approx(1 / 7)


def test_scale_sum_takes_the_number_of_latent_elements_from_the_latents():
    small = {"old_log_probs": ROLLOUT + DELTA / 100, "rollout_log_probs": ROLLOUT}
    latents = torch.zeros(4, 3, 5, 20)
    config = RolloutCorrectionConfig(**SUM)
    corrected, _ = correct_batch(small | {"all_latents": latents}, config)
    torch.testing.assert_close(corrected["rollout_is_weights"], DELTA.exp(), rtol=1e-4, atol=0)


def test_metrics_by_step_come_from_the_schedule():
    places = torch.tensor([[0, 1], [0, 1], [2, 3], [2, 3]])
    timesteps = torch.tensor(SCHEDULE)[places]
    config = RolloutCorrectionConfig.disabled()
    _, plain = correct_batch(tensors(all_timesteps=timesteps), config)
    assert not any("/step_" in name for name in plain)
    _, given = correct_batch(tensors(step_indices=places), config)
    for values in (timesteps, timesteps.bfloat16()):
        _, found = correct_batch(tensors(all_timesteps=values), config, schedule=SCHEDULE)
        assert found == given
    assert found["rollout_corr/step_0/logprob_abs_diff"] == pytest.approx(LN2)
    assert found["rollout_corr/step_2/logprob_abs_diff"] == pytest.approx(LN2 / 2)


def test_exact_kl_from_step_means():
    _, metrics = correct_batch(
        tensors(**MEANS, prev_sample_std=torch.full((4, 2), 0.5)), RolloutCorrectionConfig.disabled()
    )
    assert metrics["rollout_corr/exact_kl"] == pytest.approx(0.1**2 / (2 * 0.25))


def test_clip_noise():
    _, metrics = correct_batch(tensors(), RolloutCorrectionConfig.disabled(), clip_ratio=0.7)
    assert metrics["rollout_corr/clip_noise_fraction"] == 3 / 8  # the ratios of 2; that of a half is inside


@pytest.mark.parametrize(
    ("batch", "config", "error", "named"),
    [
        *((wrap({"old_log_probs": ROLLOUT}), {}, BatchError, "^rollout_log_probs .*calculate_log_probs=true")
          for wrap in (dict, TensorDict, lambda tensors: Proto(TensorDict(tensors)))),
        (Proto(batch=None), {}, BatchError, "the Proto .*rollout_log_probs"),
        (tensors(), SUM, BatchError, "log_ratio_scale='sum' .*num_elements"),
        (tensors(**MEANS, prev_sample_std=torch.ones(4)), {}, BatchError, r"prev_sample_std .* \[4\]; .* \[4, 2\]"),
        ({"rollout_log_probs": ROLLOUT}, {}, BatchError, "^old_log_probs .* rollout_log_probs;"),
        (tensors(old_log_probs=ROLLOUT[:, :1]), {}, BatchError, r"rollout_log_prob .* \[4, 2\]; .* \[4, 1\]"),
        (tensors(), {"rejection_groups": "recentre", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
         ConfigError, "bypass_mode=False with rejection_groups='recentre' "),
        (tensors(), {"bypass_mode": "auto"}, ConfigError, "bypass_mode=auto with rejection_groups='none' "),
        (tensors(), {"rollout_iss": "token"}, ConfigError, r"'rollout_iss' .* rollout_is\?"),
        (tensors(), "seq_is", ConfigError, "config='seq_is' .*RolloutCorrectionConfig"),
        (tensors(all_latents=ROLLOUT), {}, BatchError, r"all_latents .* \[4, 2\]; .* \[B, T\+1, \*L\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_corrected_is_an_error(batch, config, error, named):
    with pytest.raises(error, match=named):
        correct_batch(batch, config)


@pytest.mark.parametrize(
    ("timesteps", "options", "error", "named"),
    [
        ({}, {"clip_ratio": 0.0}, ConfigError, r"clip_ratio=0\.0 .*positive"),
        ({}, {"clip_ratio": "1e-3"}, ConfigError, "clip_ratio='1e-3' .*positive"),
        ({"all_timesteps": ROLLOUT}, {"schedule": []}, BatchError, r"schedule=\[\] .*timesteps"),
        (
            {"all_timesteps": torch.ones(4, 2)},
            {"schedule": SCHEDULE},
            BatchError,
            r"all_timesteps holds 1, .*schedule=\[1000",
        ),
        ({}, {"schedule": SCHEDULE}, BatchError, r"all_timesteps .*rollout_log_probs; .*`schedule`$"),
    ],
)
def test_options_that_are_of_no_use_are_named(timesteps, options, error, named):
    with pytest.raises(error, match=named):
        correct_batch(tensors(**timesteps), {}, **options)
