"""Batches and losses of verl-omni. Where the environment variable VERL_OMNI does not name its source tree (see
`test_real_verl_omni.py`), `registry` stands in for its own, and `Proto` for verl's `DataProto`.
"""

import importlib
import math
import sys
import types
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import BatchError, ConfigError, MissingExtraError
from flowcorr.integrations.verl_omni import LOSSES, correct_batch, register_losses, step_loss

LN2 = math.log(2)
SCHEDULE = (1000.0, 944.0, 881.0, 801.0)
ROLLOUT = torch.tensor([[-1.0, -1.5], [-2.0, -1.0], [-1.2, -1.3], [-0.7, -0.9]])
DELTA = torch.tensor([[LN2, 0.0], [LN2, LN2], [-LN2, 0.0], [0.0, 0.0]])


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
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=10.0, log_ratio_scale="sum")
    corrected, _ = correct_batch(small | {"all_latents": latents}, config)
    torch.testing.assert_close(corrected["rollout_is_weights"], DELTA.exp(), rtol=1e-4, atol=0)
    with pytest.raises(BatchError, match="num_elements"):
        correct_batch(small, config)


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
    with pytest.raises(BatchError, match=r"all_timesteps holds 1, which is not in schedule=\[1000"):
        correct_batch(tensors(all_timesteps=timesteps / 1000), config, schedule=SCHEDULE)
    with pytest.raises(BatchError, match=r"all_timesteps is not in the batch.*leave out `schedule`"):
        correct_batch(tensors(), config, schedule=SCHEDULE)


def test_exact_kl_from_step_means():
    old = torch.zeros(4, 2, 3, 5)
    means = {"old_prev_sample_mean": old, "rollout_prev_sample_mean": old + 0.1}
    _, metrics = correct_batch(
        tensors(**means, prev_sample_std=torch.full((4, 2), 0.5)), RolloutCorrectionConfig.disabled()
    )
    assert metrics["rollout_corr/exact_kl"] == pytest.approx(0.1**2 / (2 * 0.25))
    with pytest.raises(BatchError, match="prev_sample_std has shape"):
        correct_batch(tensors(**means, prev_sample_std=torch.ones(4)), RolloutCorrectionConfig.disabled())


def test_clip_noise():
    _, metrics = correct_batch(tensors(), RolloutCorrectionConfig.disabled(), clip_ratio=0.7)
    assert metrics["rollout_corr/clip_noise_fraction"] == 3 / 8  # the ratios of 2; that of a half is inside


@pytest.mark.parametrize(
    ("batch", "config", "error", "message"),
    [
        ({"old_log_probs": ROLLOUT}, {}, BatchError, "rollout_log_probs is not in.*calculate_log_probs=true"),
        ({"rollout_log_probs": ROLLOUT}, {}, BatchError, "old_log_probs is not in.*has rollout_log_probs;"),
        (tensors(old_log_probs=ROLLOUT[:, :1]), {}, BatchError, "shape"),
        (tensors(), {"rejection_groups": "recentre", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
         ConfigError, "rejection_groups='recentre' needs flowcorr's own trainer"),
        (tensors(), {"bypass_mode": "auto"}, ConfigError, "bypass_mode=auto"),
        (tensors(), {"rollout_iss": "token"}, ConfigError, "rollout_iss.*did you mean rollout_is"),
    ],
)  # fmt: skip
def test_what_cannot_be_corrected_is_an_error(batch, config, error, message):
    with pytest.raises(error, match=message):
        correct_batch(batch, config)


def test_a_data_proto_without_tensors_is_named():
    with pytest.raises(BatchError, match="the Proto holds no tensors"):
        correct_batch(Proto(batch=None), RolloutCorrectionConfig.bypass_ppo_clip())


@pytest.mark.parametrize("wrap", [dict, TensorDict, lambda tensors: Proto(TensorDict(tensors))])
def test_what_a_batch_lacks_is_named_in_every_container(wrap):
    with pytest.raises(BatchError, match="rollout_log_probs is not in the batch, which has old_log_probs;"):
        correct_batch(wrap({"old_log_probs": ROLLOUT}), RolloutCorrectionConfig.seq_is())


# Losses --------------------------------------------------------------------------------------------------

SIZE, SHAPE, CLIP = 6, (3, 5), 0.05
STD_COEFFICIENT, ROOT = 0.8, 0.3


def actor_config(**settings):
    values = {"clip_ratio": CLIP, "adv_clip_max": 5.0, "kl_mask_threshold": 1e-3, "add_kl_coefficient": True}
    return SimpleNamespace(diffusion_loss=SimpleNamespace(**{**values, **settings}))


def step_inputs(**data):
    """One step of a micro-batch, as verl-omni's engine hands it to a loss."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=draw, dtype=torch.float64)

    old, mean = normal(SIZE), normal(SIZE, *SHAPE)
    output = {
        "log_probs": (old + normal(SIZE, scale=0.05)).requires_grad_(),
        "prev_sample_mean": (mean + normal(SIZE, *SHAPE, scale=0.02)).requires_grad_(),
        "std_dev_t": torch.full((SIZE, 1, 1), STD_COEFFICIENT, dtype=torch.float64),
        "sqrt_dt": torch.full((SIZE,), ROOT, dtype=torch.float64),
    }
    batch = {"old_log_probs": old, "advantages": normal(SIZE), "old_prev_sample_mean": mean}
    return {"config": actor_config(), "model_output": output, "data": batch | data}


def clipped(advantage, ratio):
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))


def test_flow_grpo_is_the_mean_of_clipped_weighted_terms():
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    inputs = step_inputs(rollout_is_weights=weight)
    loss, metrics = step_loss("flow_grpo", **inputs)
    log_prob, data = inputs["model_output"]["log_probs"], inputs["data"]
    terms = clipped(data["advantages"], (log_prob - data["old_log_probs"]).exp())
    expected = (weight * terms).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*torch.autograd.grad(loss, log_prob), *torch.autograd.grad(expected, log_prob))
    assert isinstance(metrics["actor/pg_clipfrac"], float)


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_grpo_guard_takes_the_full_std(sde_type):
    inputs = step_inputs()
    loss, _ = step_loss("grpo_guard", sde_type=sde_type, **inputs)
    output, data = inputs["model_output"], inputs["data"]
    std = STD_COEFFICIENT * ROOT if sde_type == "sde" else STD_COEFFICIENT
    drift = (output["prev_sample_mean"] - data["old_prev_sample_mean"]).square().mean((1, 2))
    log_ratio = output["log_probs"] - data["old_log_probs"] + drift / (2 * std**2)
    torch.testing.assert_close(loss, clipped(data["advantages"], (log_ratio * std).exp()).mean() / ROOT**2)


def test_flow_dppo_drops_what_moves_away_from_outside_the_threshold():
    inputs = step_inputs()
    output, data = inputs["model_output"], inputs["data"]
    kl = (output["prev_sample_mean"] - data["old_prev_sample_mean"]).square().mean((1, 2))
    kl = kl / (2 * (STD_COEFFICIENT * ROOT) ** 2)
    inputs["config"] = actor_config(kl_mask_threshold=kl.quantile(0.5).item())
    loss, _ = step_loss("flow_dppo", **inputs)
    ratio = (output["log_probs"] - data["old_log_probs"]).exp()
    dropped = (kl > kl.quantile(0.5)) & ((ratio - 1) * data["advantages"] > 0)
    assert 0 < dropped.sum() < SIZE
    torch.testing.assert_close(loss, torch.where(dropped, 0.0, -data["advantages"] * ratio).mean())
    with pytest.raises(ConfigError, match="add_kl_coefficient=false"):
        step_loss("flow_dppo", **{**inputs, "config": actor_config(add_kl_coefficient=False)})


def test_flow_dppo_takes_advantages_as_they_are():
    inputs = step_inputs(advantages=torch.full((SIZE,), 10.0, dtype=torch.float64))
    inputs["config"] = actor_config(adv_clip_max=5.0, kl_mask_threshold=1e3)
    ratio = (inputs["model_output"]["log_probs"] - inputs["data"]["old_log_probs"]).exp()
    torch.testing.assert_close(step_loss("flow_dppo", **inputs)[0], -10 * ratio.mean())


def test_a_rejected_term_that_is_not_finite_leaves_no_trace():
    weight = torch.ones(SIZE, dtype=torch.float64)
    weight[1] = 0
    inputs = step_inputs(rollout_is_weights=weight)
    inputs["data"]["old_log_probs"][1] = math.nan
    loss, _ = step_loss("flow_grpo", **inputs)
    loss.backward()
    gradient = inputs["model_output"]["log_probs"].grad
    assert gradient.isfinite().all()
    assert gradient[1] == 0


def test_micro_batches_add_up_as_verl_omni_accumulates():
    inputs = step_inputs(rollout_is_weights=torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.0], dtype=torch.float64))
    whole, _ = step_loss("grpo_guard", **inputs)
    parts = [
        step_loss(
            "grpo_guard",
            config=inputs["config"],
            model_output={name: values[rows] for name, values in inputs["model_output"].items()},
            data={name: values[rows] for name, values in inputs["data"].items()},
        )[0]
        for rows in torch.arange(SIZE).split(2)
    ]
    torch.testing.assert_close(sum(parts) / len(parts), whole)


def test_bypass_rejects_single_steps_inside_the_loss():
    inputs = step_inputs()
    config = RolloutCorrectionConfig(
        bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=(0.97, 1.03)
    )
    loss, metrics = step_loss("flow_grpo", correction=config, **inputs)
    data = inputs["data"]
    ratio = (inputs["model_output"]["log_probs"] - data["old_log_probs"]).exp()
    keep = (ratio >= 0.97) & (ratio <= 1.03)
    assert 0 < keep.sum() < SIZE
    torch.testing.assert_close(loss, torch.where(keep, clipped(data["advantages"], ratio), 0.0).mean())
    rejected = 1 - keep.double().mean().item()
    assert metrics["actor/rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected)
    assert all(name.startswith("actor/") and "/step_" not in name for name in metrics)


def test_bypass_keeps_the_weights_of_the_batch():
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    inputs = step_inputs(rollout_is_weights=weight)
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=1.03)
    data = inputs["data"]
    ratio = (inputs["model_output"]["log_probs"] - data["old_log_probs"]).exp()
    expected = torch.where(
        (ratio <= 1.03) & (ratio >= 1 / 1.03), weight * clipped(data["advantages"], ratio), 0.0
    ).mean()
    torch.testing.assert_close(step_loss("flow_grpo", correction=config, **inputs)[0], expected)
    config = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token")
    expected = (-weight * ratio * data["advantages"] * inputs["model_output"]["log_probs"]).mean()
    torch.testing.assert_close(step_loss("flow_grpo", correction=config, **inputs)[0], expected)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "correction",
    [None, RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=1.001)],
)
def test_every_micro_batch_has_the_same_metrics(name, correction):
    _, expected = step_loss(name, correction=correction, **step_inputs(rollout_is_weights=torch.ones(SIZE)))
    rejected = step_inputs(rollout_is_weights=torch.zeros(SIZE))
    damaged = step_inputs(rollout_is_weights=torch.ones(SIZE))
    damaged["data"]["old_log_probs"] = torch.full((SIZE,), math.nan, dtype=torch.float64)
    for inputs in (rejected, damaged):
        loss, metrics = step_loss(name, correction=correction, **inputs)
        assert loss == 0
        assert set(metrics) == set(expected)
        assert all(math.isfinite(value) for value in metrics.values())
        assert (metrics["actor/ratio_mean"], metrics["actor/ppo_kl"]) == (1.0, 0.0)


# The registry --------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """verl-omni's `diffusion_algos`, or the part of it that losses are registered with."""
    path = "verl_omni.trainer.diffusion.diffusion_algos"
    try:
        module = importlib.import_module(path)
    except ImportError:
        parents = path.split(".")
        for end in range(1, len(parents)):
            monkeypatch.setitem(
                sys.modules, ".".join(parents[:end]), types.ModuleType(".".join(parents[:end]))
            )
        module = _stand_in(path)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(module, "DIFFUSION_LOSS_REGISTRY", {})
    return module


def _stand_in(path):
    from abc import ABC, abstractmethod

    module = types.ModuleType(path)
    module.DIFFUSION_LOSS_REGISTRY = {}

    @dataclass
    class DiffusionLossResult:
        loss: torch.Tensor
        metrics: dict
        add_loss_metric: bool = False

    class DiffusionLossFn(ABC):
        required_model_output_keys = ()
        required_data_keys = ()

        @classmethod
        @abstractmethod
        def compute_loss(cls, **kwargs): ...

        @abstractmethod
        def __call__(self, *, config, model_output, data): ...

        def validate_inputs(self, *, loss_name, model_output, data):
            if any(key not in data for key in self.required_data_keys):
                raise KeyError(loss_name)

    def register_diffusion_loss(name):
        def decorate(cls):
            module.DIFFUSION_LOSS_REGISTRY[name] = cls()
            return cls

        return decorate

    module.DiffusionLossResult, module.DiffusionLossFn = DiffusionLossResult, DiffusionLossFn
    module.register_diffusion_loss = register_diffusion_loss
    return module


def test_losses_are_registered_and_compute(registry):
    register_losses()
    found = registry.DIFFUSION_LOSS_REGISTRY
    assert set(found) == set(LOSSES)
    for name, loss in found.items():
        inputs = step_inputs()
        data = TensorDict(inputs["data"], batch_size=[SIZE])
        assert ("old_prev_sample_mean" in loss.required_data_keys) == (name in ("grpo_guard", "flow_dppo"))
        result = loss(config=inputs["config"], model_output=inputs["model_output"], data=data)
        assert isinstance(result, registry.DiffusionLossResult)
        torch.testing.assert_close(result.loss, step_loss(name, **step_inputs())[0])
        assert not result.add_loss_metric


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_losses_ask_for_no_more_than_they_read(registry, sde_type):
    register_losses(sde_type=sde_type)
    for name, loss in registry.DIFFUSION_LOSS_REGISTRY.items():
        inputs = step_inputs()
        expected, _ = step_loss(name, sde_type=sde_type, **inputs)
        inputs["model_output"] = {key: inputs["model_output"][key] for key in loss.required_model_output_keys}
        inputs["data"] = {key: inputs["data"][key] for key in loss.required_data_keys}
        torch.testing.assert_close(loss(**inputs).loss, expected)
    wanted = {
        name: loss.required_model_output_keys for name, loss in registry.DIFFUSION_LOSS_REGISTRY.items()
    }
    assert wanted["flow_grpo"] == wanted["dance_grpo"] == ("log_probs",)
    assert "sqrt_dt" in wanted["grpo_guard"]
    assert ("sqrt_dt" in wanted["flow_dppo"]) == (sde_type == "sde")


def test_scale_sum_asks_for_the_latents(registry):
    config = RolloutCorrectionConfig(
        bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=1.5, log_ratio_scale="sum"
    )
    register_losses(config)
    loss = registry.DIFFUSION_LOSS_REGISTRY["flow_grpo"]
    assert loss.required_model_output_keys == ("log_probs", "prev_sample_mean")
    inputs = step_inputs()
    delta = inputs["model_output"]["log_probs"].detach() - inputs["data"]["old_log_probs"]
    rejected = (15 * delta).abs() > math.log(1.5)
    assert 0 < rejected.sum() < SIZE
    metrics = loss(**inputs).metrics
    share = rejected.double().mean().item()
    assert metrics["actor/rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_compute_by_verl_omnis_keywords(registry, name):
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    inputs = step_inputs(rollout_is_weights=weight)
    expected, _ = step_loss(name, **inputs)
    register_losses()
    data, output = inputs["data"], inputs["model_output"]
    means = {
        "old_prev_sample_mean": data["old_prev_sample_mean"],
        "prev_sample_mean": output["prev_sample_mean"],
        "std_dev_t": output["std_dev_t"],
        "sqrt_dt": output["sqrt_dt"],
    }
    value, _ = registry.DIFFUSION_LOSS_REGISTRY[name].compute_loss(
        old_log_prob=data["old_log_probs"],
        log_prob=output["log_probs"],
        advantages=data["advantages"],
        config=inputs["config"],
        rollout_is_weights=weight,
        **(means if name in ("grpo_guard", "flow_dppo") else {}),
    )
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("name", ["grpo_guard", "flow_dppo"])
def test_losses_of_means_say_that_bypass_mode_has_none(registry, name):
    register_losses(RolloutCorrectionConfig.bypass_ppo_clip())
    inputs = step_inputs()
    del inputs["data"]["old_prev_sample_mean"], inputs["config"]
    with pytest.raises(
        ConfigError, match=f"loss_mode={name} needs old_prev_sample_mean.*use flow_grpo or dance_grpo"
    ):
        registry.DIFFUSION_LOSS_REGISTRY[name].validate_inputs(loss_name=name, **inputs)


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])  # two names of one loss
def test_registered_losses_correct_in_bypass_mode(registry, name):
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=1.03)
    register_losses(config)
    result = registry.DIFFUSION_LOSS_REGISTRY[name](**step_inputs())
    torch.testing.assert_close(result.loss, step_loss("flow_grpo", correction=config, **step_inputs())[0])
    assert 0 < result.metrics["actor/rollout_corr/rollout_rs_masked_fraction"] < 1


@pytest.mark.parametrize("config", [RolloutCorrectionConfig.seq_is(), RolloutCorrectionConfig.bypass_pg_is()])
def test_only_a_correction_of_single_steps_can_be_registered(config):
    with pytest.raises(ConfigError, match=r"give bypass_mode: true.*scope: step, or None"):
        register_losses(config)


def test_without_verl_omni_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl_omni.trainer.diffusion.diffusion_algos", None)
    with pytest.raises(MissingExtraError, match=r"needs verl-omni; install it with: pip install git\+https"):
        register_losses()
