"""Rollout correction and losses inside verl-omni, through its batches and its registry; nothing is patched.

verl-omni is not on PyPI; this follows https://github.com/verl-project/verl-omni at a1139ba, and `tests/integrations`
runs its trainer, worker and engine from such a source tree.

Its own `algorithm.rollout_correction` calls verl's helper. To let flowcorr correct instead, set `rollout_is` and
`rollout_rs` to null there, `bypass_mode` as in flowcorr's configuration, and
`actor_rollout_ref.rollout.calculate_log_probs=true`. Then correct the batch before the update, in a subclass of its
trainer, as the module `my_run.py` does in `flowcorr/correction/README.md`, where `register_losses()` may follow:

    VERL_USE_EXTERNAL_MODULES=my_run python -m verl_omni.trainer.main_diffusion_v1 trainer.use_v1=true ...

- verl imports the modules that `VERL_USE_EXTERNAL_MODULES` names before it chooses a trainer, and in every worker. Ray
  passes the variable on within a node; for other nodes, set it in `ray_kwargs.ray_init.runtime_env.env_vars`.
- A module named by `actor_rollout_ref.model.external_lib` is imported after the trainer is chosen: it can register
  losses, but no trainer.
- `trainer.use_v1` is false by default, and such runs never look for a registered trainer.
  `PolicyGradientRayTrainer._update_actor`, which they call, can be overridden in the same way.
- With `trainer.v1.trainer_mode=separate_async`, where weights are the stalest, derive the class from
  `PolicyGradientDiffusionTrainerV1SeparateAsync` and register it as `separate_async`.
- In bypass mode only `flow_grpo` and `dance_grpo` work. `grpo_guard` and `flow_dppo` need the old policy's step means,
  which no rollout of verl-omni returns; its own losses of these names stop there as well. Bands are fixed ones: a loss
  sees one micro-batch, and those that measure themselves need earlier training steps.

Its log-probs are mean-pooled per step, as flowcorr's are. Those of `sde_type=cps` lack `1 / (2 s^2)` and the
normaliser. They are not log-densities, so weights, bands and metrics have no unit there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowcorr import losses
from flowcorr.algorithm import diffusion_loss
from flowcorr.algorithm.noise_floor import clip_noise
from flowcorr.algorithm.terms import exact_kl
from flowcorr.config.older_verl import from_older, older_metrics
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import OFF, RolloutCorrectionConfig, compute_rollout_correction_and_rejection_mask
from flowcorr.errors import BatchError, ConfigError, MissingExtraError
from flowcorr.losses.terms import check_positive
from flowcorr.records import LossOutput, Terms, check_shape
from flowcorr.sde import SdeType, step_kl

LOSSES = {
    "flow_grpo": "flow_grpo",
    "dance_grpo": "flow_grpo",
    "grpo_guard": "grpo_guard",
    "flow_dppo": "flow_dppo",
}
"""verl-omni's losses of log-probs, and the corresponding losses of flowcorr. Its configuration accepts no others."""
INSTALL = "pip install git+https://github.com/verl-project/verl-omni"

_REMEDIES = {
    "rollout_log_probs": "set actor_rollout_ref.rollout.calculate_log_probs=true",
    "old_log_probs": "let the trainer recompute them, or correct in bypass mode",
    "all_timesteps": "leave out `schedule`",
}
_ROUNDING = 2.0**-8  # relative; timesteps may have been rounded to bfloat16

BatchT = TypeVar("BatchT")


def correct_batch(
    batch: BatchT,
    config: RolloutCorrectionConfig | Mapping[str, Any],
    *,
    schedule: Sequence[float] | None = None,
    clip_ratio: float | None = None,
) -> tuple[BatchT, dict[str, float]]:
    """Correct a whole batch: in decoupled mode after `old_log_probs` are computed, in bypass mode instead.

    Needed are `rollout_log_probs` `[B, T]` and, in decoupled mode, `old_log_probs` `[B, T]`. If present,
    `response_mask` and `step_indices` `[B, T]` and `all_latents` `[B, T+1, *L]` (for `D`) are used too. For the exact
    KL to `old_prev_sample_mean`, a rollout adapter can add its step means as `rollout_prev_sample_mean` `[B, T, *L]`
    and the full stds as `prev_sample_std` `[B, T]`. verl-omni itself does not know these two names.

    Decoupled mode writes `rollout_is_weights` `[B, T]`, which is 0 for rejected terms: verl-omni's losses read nothing
    else. They divide by all terms, so `rollout_rs_denominator: kept` multiplies the weights by `B T / kept`. In its
    losses 0 times NaN is NaN; only the losses of `register_losses` leave out terms that are not finite. Bypass mode
    writes `old_log_probs`; the correction itself happens inside the loss.

    Args:
        batch: verl's `DataProto`, or its TensorDict, or a dict of tensors. It is left as it is.
        config: the correction, or a mapping with its keys or verl's, such as `config.algorithm.rollout_correction`.
        schedule: timesteps of the whole schedule, from which the step index of each of `all_timesteps` follows, for
            metrics by step.
        clip_ratio: the loss's clip range, for `rollout_corr/clip_noise_fraction`; None for a loss whose ratio is not
            `exp(log_prob - old_log_prob)`, as grpo_guard's.

    Returns:
        A batch of the same type that shares all other tensors, and the `rollout_corr/*` metrics; none in bypass mode.

    Raises:
        ConfigError: the correction is invalid, or needs flowcorr's own trainer.
        BatchError: a tensor is missing or has another shape.
    """
    config = _as_config(config)
    tensors: Any = batch if isinstance(batch, Mapping) else getattr(batch, "batch", batch)
    if tensors is None:
        raise BatchError(
            f"the {type(batch).__name__} holds no tensors; give the batch that the update will get, with "
            "rollout_log_probs and, in decoupled mode, old_log_probs"
        )
    rollout_log_probs = _tensor(tensors, "rollout_log_probs")
    if config.mode == "bypass":
        return _with(batch, tensors, old_log_probs=rollout_log_probs), {}
    old_log_probs = _tensor(tensors, "old_log_probs")
    if clip_ratio is not None:
        check_positive("clip_ratio", clip_ratio)
    latents = tensors.get("all_latents")
    if latents is not None and latents.dim() < 3:
        raise BatchError(f"all_latents has shape {list(latents.shape)}; it must be [B, T+1, *L]")
    num_elements = None if latents is None else latents[0, 0].numel()
    correction = compute_rollout_correction_and_rejection_mask(
        old_log_probs,
        rollout_log_probs,
        tensors.get("response_mask"),
        step_kl=_step_kl(tensors),
        step_indices=_step_indices(tensors, schedule),
        num_elements=num_elements,
        num_steps=None if schedule is None else len(schedule),
        **config.options,
    )
    keep = correction.keep
    weights = keep.float() if correction.weights is None else torch.where(keep, correction.weights, 0.0)
    if config.rollout_rs_denominator == "kept":
        weights = weights * (keep.numel() / keep.sum().clamp(min=1))
    corrected = _with(batch, tensors, rollout_is_weights=weights.to(old_log_probs.dtype))
    metrics = correction.metrics
    if clip_ratio is not None:
        mask, log_ratio = tensors.get("response_mask"), old_log_probs - rollout_log_probs
        metrics = metrics.merge(
            clip_noise(log_ratio, None if mask is None else mask.bool(), "step", clip_ratio)
        )
    if config.log_legacy_names:
        log_probs = (old_log_probs, rollout_log_probs, tensors.get("response_mask"))
        metrics = metrics.merge(older_metrics(metrics, *log_probs, config, num_elements))
    return corrected, metrics.compute()


def register_losses(correction: RolloutCorrectionConfig = OFF, *, sde_type: SdeType = "sde") -> None:
    """Put flowcorr's `LOSSES` into verl-omni's registry, in place of its own of these names.

    They leave rejected and non-finite terms out before anything is computed from them, take the full std of each
    sample where verl-omni's take the mean over the batch, and in bypass mode correct with flowcorr. Like verl-omni's,
    they return the mean over all terms of a micro-batch, rejected ones included, so that its accumulation adds up.

    Args:
        correction: in bypass mode, what is done about the drift of each single step; left out in decoupled mode, whose
            outcome is in the batch. `rollout_rs_denominator` has no effect here: no worker knows what others keep.
        sde_type: `actor_rollout_ref.rollout.algo.sde_type`, which says what `std_dev_t` is.

    Raises:
        ConfigError: `correction` is not one of single steps in bypass mode, or needs what a micro-batch does not hold.
        MissingExtraError: verl-omni is not installed.
    """
    if correction.mode != "off" and (correction.mode != "bypass" or correction.bypass_scope != "step"):
        raise ConfigError(
            f"register_losses(correction=...) has bypass_mode={correction.bypass_mode}, "
            f"bypass_scope={correction.bypass_scope!r}; verl-omni's losses see single steps, so give bypass_mode: true "
            "with bypass_scope: step, or leave it out in decoupled mode"
        )
    _check_uncentred(correction)
    if correction.needs_batch or correction.needs_means:
        lack = "needs the rollout's step means, which verl-omni drops"
        if correction.needs_batch:
            lack = "compares with earlier training steps, which no loss here sees: it would reject nothing"
        raise ConfigError(
            f"register_losses(correction=...) has rollout_rs={correction.rollout_rs!r} with rollout_rs_threshold="
            f"{correction.rollout_rs_threshold!r}, which {lack}; give fixed bounds of a ratio, such as "
            "rollout_rs: token_k1 with rollout_rs_threshold: 0.9999_1.0001"
        )
    try:
        from verl_omni.trainer.diffusion.diffusion_algos import (
            DiffusionLossFn,
            DiffusionLossResult,
            register_diffusion_loss,
        )
    except ImportError as error:
        raise MissingExtraError("register_losses", "verl-omni", None, error, install=INSTALL) from error

    def register(name: str) -> None:
        loss = partial(step_loss, name, correction=correction, sde_type=sde_type)
        reads_means = losses.LOSSES[LOSSES[name]].needs_kl

        @register_diffusion_loss(name)
        class Loss(DiffusionLossFn):
            required_model_output_keys = _model_output_keys(name, correction, sde_type)
            required_data_keys = ("old_log_probs", "advantages", *["old_prev_sample_mean"] * reads_means)

            def validate_inputs(self, *, data: Any, **inputs: Any) -> None:
                if reads_means and correction.mode == "bypass" and "old_prev_sample_mean" not in data:
                    raise ConfigError(
                        f"actor_rollout_ref.actor.diffusion_loss.loss_mode={name} needs old_prev_sample_mean, and no "
                        "rollout of verl-omni returns its step means; in bypass mode use flow_grpo or dance_grpo, or "
                        "set algorithm.rollout_correction.bypass_mode=false, which recomputes them"
                    )
                super().validate_inputs(data=data, **inputs)

            @classmethod
            def compute_loss(
                cls, *, config: Any, log_prob: Tensor, old_log_prob: Tensor, **tensors: Tensor | None
            ) -> tuple[Tensor, dict[str, float]]:
                """The loss by the keywords of verl-omni's own."""
                given = {"log_probs": log_prob, "old_log_probs": old_log_prob}
                given |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
                return loss(config=config, model_output=given, data=given)

            def __call__(self, **inputs: Any) -> Any:
                value, metrics = loss(**inputs)
                return DiffusionLossResult(loss=value, metrics=metrics)

    for name in LOSSES:
        register(name)


def step_loss(
    name: str,
    *,
    config: Any,
    model_output: Mapping[str, Tensor],
    data: Mapping[str, Tensor],
    correction: RolloutCorrectionConfig = OFF,
    sde_type: SdeType = "sde",
) -> tuple[Tensor, dict[str, float]]:
    """The loss `name` of one micro-batch at one step, from the arguments that verl-omni passes to its losses.

    Args:
        name: one of `LOSSES`.
        config: its `DiffusionActorConfig`; `diffusion_loss` has the clip ranges.
        model_output: `log_probs` `[b]`, and where the loss reads them `prev_sample_mean` `[b, *L]`, `std_dev_t`
            `[b, 1, ...]` or a number, and `sqrt_dt`.
        data: `old_log_probs` and `advantages` `[b]`; `rollout_is_weights` `[b]` and `old_prev_sample_mean`, if there.
        correction: see `register_losses`.
        sde_type: see `register_losses`.

    Returns:
        The mean over all `b` terms, and metrics as floats, always the same ones: where no term is kept, those of kept
        terms are what they would be if the policy had not moved (ratio 1, KL 0).
    """
    settings, log_prob = config.diffusion_loss, model_output["log_probs"]
    bounds_kl = "kl_threshold" in (losses.LOSSES[LOSSES[name]].reads or ())
    if bounds_kl and not settings.add_kl_coefficient:
        raise ConfigError(
            "actor_rollout_ref.actor.diffusion_loss.add_kl_coefficient=false bounds a squared distance, and flowcorr's "
            f"{name} an exact KL; set it to true"
        )
    # Only what the loss reads: with a bound on the KL, verl-omni does not clamp advantages.
    if bounds_kl:
        read = {"kl_threshold": settings.kl_mask_threshold, "adv_clip_max": torch.finfo(torch.float32).max}
    else:
        read = {"clip_ratio": settings.clip_ratio, "adv_clip_max": settings.adv_clip_max}
    actor = ActorConfig(loss_mode=LOSSES[name], **read)
    output = {key: model_output[key] for key in _model_output_keys(name, correction, sde_type)}
    root, std = (
        output[key].reshape(-1).expand_as(log_prob) if key in output else torch.ones_like(log_prob)
        for key in ("sqrt_dt", "std_dev_t")
    )
    std = std * root if sde_type == "sde" else std
    means, old_means, size = output.get("prev_sample_mean"), data.get("old_prev_sample_mean"), None
    if means is not None:
        size = means[0].numel()
    weight = data.get("rollout_is_weights")
    terms = Terms(
        log_prob=log_prob,
        old_log_prob=data["old_log_probs"],
        rollout_log_prob=data["old_log_probs"],  # in bypass mode they are; in decoupled mode nobody asks
        advantage=data["advantages"],
        std=std,
        step=root.square(),
        step_index=torch.zeros_like(log_prob, dtype=torch.int64),
        old_kl=exact_kl(means, old_means, std),
        weight=weight,
        keep=None if weight is None else weight != 0,
        num_elements=size,
    )
    result = diffusion_loss(terms, actor, correction, num_steps=1)
    metrics = _logged(result)
    if not result.count_kept:  # verl wants the same metrics from every micro-batch of every rank
        unmoved = diffusion_loss(_unmoved(terms), actor, correction, num_steps=1)
        metrics = {**_logged(unmoved), **metrics}
    return result.loss_sum / log_prob.numel(), metrics


def _model_output_keys(name: str, correction: RolloutCorrectionConfig, sde_type: SdeType) -> tuple[str, ...]:
    """The tensors of the model's output that the loss called `name` reads."""
    keys = ["log_probs"]
    loss = losses.LOSSES[LOSSES[name]]
    if loss.needs_kl:
        keys += ["prev_sample_mean", "std_dev_t"]
        if loss.needs_step or sde_type == "sde":
            keys.append("sqrt_dt")
    elif correction.log_ratio_scale in ("sqrt", "sum"):
        keys.append("prev_sample_mean")  # for the number of latent elements
    return tuple(keys)


def _logged(output: LossOutput) -> dict[str, float]:
    """All metrics under `actor/`, without rows by step: a step's place in the schedule is not known here."""
    logged = output.metrics.merge(output.correction_metrics.prefixed("actor/"))
    return {key: value for key, value in logged.compute().items() if "/step_" not in key}


def _unmoved(terms: Terms) -> Terms:
    """The same terms, none of them rejected, under a current policy that is still the old one."""
    old_log_prob = terms.old_log_prob.nan_to_num(0.0, 0.0, 0.0)
    zeros = torch.zeros_like(old_log_prob)
    return replace(
        terms,
        log_prob=old_log_prob,
        old_log_prob=old_log_prob,
        rollout_log_prob=old_log_prob,
        advantage=zeros,
        old_kl=zeros,
        weight=None,
        keep=None,
    )


def _as_config(config: RolloutCorrectionConfig | Mapping[str, Any]) -> RolloutCorrectionConfig:
    if isinstance(config, Mapping):
        config = from_older({k: v for k, v in config.items() if k != "_target_"})
    if not isinstance(config, RolloutCorrectionConfig):
        raise ConfigError(
            f"config={config!r} must be a RolloutCorrectionConfig, such as RolloutCorrectionConfig.seq_is(), or a "
            "mapping with its keys"
        )
    if config.mode == "auto" or config.rejection_groups != "none":
        raise ConfigError(
            f"bypass_mode={config.bypass_mode} with rejection_groups={config.rejection_groups!r} needs flowcorr's own "
            "trainer; in verl-omni set bypass_mode to true or false, and rejection_groups to none"
        )
    _check_uncentred(config)
    return config


def _check_uncentred(config: RolloutCorrectionConfig) -> None:
    if config.score_centering:
        raise ConfigError(
            "score_centering=true needs the rollout's step means, which verl-omni drops; set it to false, or call "
            "flowcorr.sde.centred_log_prob where you have both means"
        )


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    value = tensors.get(name)
    if value is None:
        held = ", ".join(tensors.keys())  # iterating over a TensorDict gives its rows
        raise BatchError(f"{name} is not in the batch, which has {held}; {_REMEDIES[name]}")
    return value


def _step_kl(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Exact KL `[B, T]` of each step a latent element; None unless both step means are known."""
    names = ("old_prev_sample_mean", "rollout_prev_sample_mean", "prev_sample_std")
    old, rollout, std = (tensors.get(name) for name in names)
    if old is None or rollout is None or std is None:
        return None
    check_shape(names[1], rollout, tuple(old.shape))
    check_shape(names[2], std, tuple(old.shape[:2]))
    return step_kl(old, rollout, std)


def _step_indices(tensors: Mapping[str, Tensor], schedule: Sequence[float] | None) -> Tensor | None:
    """Places `[B, T]` in the schedule, of the batch itself or from its timesteps."""
    given = tensors.get("step_indices")
    if given is not None or schedule is None:
        return given
    timesteps = _tensor(tensors, "all_timesteps").double()
    if isinstance(schedule, str) or len(schedule) == 0:  # a tensor has no truth value
        raise BatchError(f"schedule={schedule!r} must be the timesteps of the whole schedule")
    table = torch.as_tensor(schedule, dtype=torch.float64, device=timesteps.device)
    distance, index = (timesteps.unsqueeze(-1) - table).abs().min(-1)
    strange = timesteps[distance > _ROUNDING * table[index].abs()]
    if strange.numel():
        raise BatchError(
            f"all_timesteps holds {strange[0].item():g}, which is not in schedule={table.tolist()}; give the timesteps "
            "that the rollout was sampled with, in the unit of the batch"
        )
    return index


def _with(batch: BatchT, tensors: Any, **written: Tensor) -> BatchT:
    """The batch with `written` in it; nothing that was given is changed."""
    copied = tensors.copy()
    copied.update(written)
    return copied if tensors is batch else replace(batch, batch=copied)  # type: ignore[type-var]
