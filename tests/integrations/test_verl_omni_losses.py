"""Losses of verl-omni. Where the environment variable VERL_OMNI does not name its source (see
`test_real_verl_omni.py`), `registry` stands in for its own.
"""

import importlib
import math
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from flowcorr.correction import OFF, RolloutCorrectionConfig
from flowcorr.errors import ConfigError, MissingExtraError
from flowcorr.integrations.verl_omni import LOSSES, register_losses, step_loss

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
    [OFF, RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=1.001)],
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
    with pytest.raises(ConfigError, match=f"loss_mode={name} .*old_prev_sample_mean.*use flow_grpo "):
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
    named = f"bypass_mode={config.bypass_mode}, bypass_scope='{config.bypass_scope}'"
    with pytest.raises(ConfigError, match=named):
        register_losses(config)


@pytest.mark.parametrize(
    ("correction", "threshold", "reason"),
    [
        (RolloutCorrectionConfig.bypass_ppo_clip_auto_rs(), "'auto'", "earlier training steps"),
        (
            RolloutCorrectionConfig(bypass_mode=True, rollout_rs="step_z", rollout_rs_threshold=6.0),
            "6.0",
            "earlier training steps",
        ),
        (
            RolloutCorrectionConfig(bypass_mode=True, rollout_rs="step_kl", rollout_rs_threshold=1e-3),
            "0.001",
            "step means",
        ),
    ],
)
def test_bounds_that_a_micro_batch_cannot_have_are_refused(correction, threshold, reason):
    with pytest.raises(ConfigError, match=f"rollout_rs_threshold={threshold}, .*{reason}"):
        register_losses(correction)


def test_without_verl_omni_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl_omni.trainer.diffusion.diffusion_algos", None)
    with pytest.raises(MissingExtraError, match=r"^register_losses .*git\+https"):
        register_losses()
