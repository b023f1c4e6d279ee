"""Rules across sections: checked when a config is loaded, and when a run starts with one that was made in Python."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from flowcorr.config.build import to_mapping
from flowcorr.config.engines import SEVERAL_GPUS, resolve_engine, trains_coarser
from flowcorr.config.schema import ActorConfig, Config, LoraConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.errors import ConfigError
from flowcorr.losses import LOSS_KEYS, loss_of, resolve_loss

logger = logging.getLogger(__name__)

_CORRECTION = "algorithm.rollout_correction"
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}
# The clip range that bypass mode needs, as `flowcorr audit` counts it, between a quantized trainer and an engine on the
# unquantized base of the embedded model: `python -m tests.benchmarks.quantized_gap`.
_CLIP_NEEDED = {"nf4": 3.4e-2, "int8": 3.1e-3}


def check(config: Config) -> None:
    """Check the keys of different sections against each other.

    Raises:
        ConfigError: sections that contradict each other.
    """
    check_loss(config.actor, config.algorithm.rollout_correction)
    _check_clip(config)
    _check_auto_mode(config)
    _check_log_probs(config)
    _check_mini_batches(config)
    _check_engine_counts(config)
    _check_fsdp(config)
    _check_quantization(config)
    _check_unscaled(config)
    _check_kl_weighting(config)


def warn(config: Config) -> None:
    """Warn of keys without effect, of weights rounded too coarsely, and of bands that may reject a learned change.

    Warns:
        UserWarning: one for each such key that differs from its default, for such weights, and for such bands.
    """
    _warn_of_rough_weights(config)
    _warn_of_bands_of_steps(config)
    default = Config()
    for key, reason in _unused(config):
        value = attrgetter(key)(config)
        if value != attrgetter(key)(default):
            warnings.warn(f"{key}={value} has no effect: {reason}", UserWarning, stacklevel=2)


def warn_of_other_scale(recipe: Any, run: Any) -> None:
    """Log a rank of the adapter that is set alone, which changes `alpha / rank` of the recipe or of the defaults.

    Args:
        recipe, run: plain values of the recipe, before and after overrides; they are not checked yet.
    """
    default, after = _rank_and_alpha({}), _rank_and_alpha(run)
    for before, origin in ((_rank_and_alpha(recipe), "the recipe"), (default, "the default")):
        if before is None or after is None or 0 in (before[0], after[0]):
            continue
        if after[1] == before[1] and after[0] != before[0]:
            (rank, alpha), scale = after, before[1] / before[0]
            logger.warning(
                "model.lora.rank=%g beside alpha %g of %s scales the adapter by %g instead of %g; model.lora.alpha=%g "
                "keeps the scale",
                *(rank, alpha, origin, alpha / rank, scale, scale * rank),
            )
            return


def _rank_and_alpha(values: Any) -> tuple[float, float] | None:
    """Rank and alpha of the adapter in plain values, with defaults for missing ones; None if one is no number yet."""
    for section in ("model", "lora"):
        values = values.get(section) if isinstance(values, dict) else None
    stated = values if isinstance(values, dict) else {}
    rank, alpha = (stated.get(key, getattr(LoraConfig(), key)) for key in ("rank", "alpha"))
    return (rank, alpha) if {type(rank), type(alpha)} <= {int, float} else None


def warn_of_replaced_keys(correction: Mapping[Any, Any], preset: str) -> None:
    """Warn of the keys of a recipe's rollout correction that the preset of an override takes the place of."""
    default = to_mapping(RolloutCorrectionConfig())
    lost = [
        str(key)
        for key, value in correction.items()
        if key != "preset" and value != default.get(str(key), object())
    ]
    if lost:
        message = f"{_CORRECTION}.preset={preset} replaces the recipe's {', '.join(lost)}"
        warnings.warn(message, UserWarning, stacklevel=5)


def check_ranks(config: Config, ranks: int) -> None:
    """Check that each rank gets prompts, and with `actor.fsdp` equally many.

    Raises:
        ConfigError: `rollout.prompts_per_step` does not fit the number of ranks.
    """
    prompts = config.rollout.prompts_per_step
    if prompts < ranks:
        raise ConfigError(
            f"rollout.prompts_per_step={prompts} leaves some of {ranks} ranks without a prompt, since the images of a "
            f"prompt stay together; use at least {ranks}, or fewer ranks"
        )
    if config.actor.fsdp and prompts % ranks:
        raise ConfigError(
            f"rollout.prompts_per_step={prompts} cannot be shared equally by {ranks} ranks, as actor.fsdp=True needs, "
            f"since every forward pass takes all ranks; use a multiple of {ranks}"
        )


def check_loss(actor: ActorConfig, correction: RolloutCorrectionConfig) -> None:
    """Check a loss against a correction.

    Raises:
        ConfigError: they contradict each other.
    """
    if resolve_loss(actor).from_correction:
        raise ConfigError(
            f"actor.loss_mode={actor.loss_mode!r} cannot be set here, since the correction supplies its weights; "
            f"set {_CORRECTION}.loss_type={actor.loss_mode} with bypass_mode=true, or {_CORRECTION}.preset=bypass_pg_is"
        )
    if correction.mode in ("off", "decoupled"):
        return
    if loss_of(actor, correction).from_correction and actor.loss_mode != ActorConfig().loss_mode:
        raise ConfigError(
            f"actor.loss_mode={actor.loss_mode!r} contradicts {_CORRECTION}.loss_type={correction.loss_type!r}, which "
            "chooses the loss too; leave loss_mode out, or set loss_type=ppo_clip"
        )
    if actor.ratio_level != "step" and correction.bypass_scope == "step":
        raise ConfigError(
            f"actor.ratio_level={actor.ratio_level!r} needs the whole window in one loss; "
            f"set {_CORRECTION}.bypass_scope=trajectory, or ratio_level=step"
        )


def _check_clip(config: Config) -> None:
    clip, (low, high) = config.actor.clip_ratio, config.sampling.sde_window_range
    if not isinstance(clip, tuple):
        return
    steps = config.sampling.num_inference_steps
    if not high <= len(clip) <= steps:
        raise ConfigError(
            f"actor.clip_ratio={list(clip)} has {len(clip)} values; give one value for each of the "
            f"sampling.num_inference_steps={steps}, or at least for the first {high}, where "
            f"sampling.sde_window_range=[{low}, {high}] ends"
        )
    if config.actor.ratio_level != "step" and len(set(clip[low:high])) > 1:
        raise ConfigError(
            f"actor.clip_ratio={list(clip)} differs by step, but actor.ratio_level={config.actor.ratio_level!r} has "
            "one ratio for the whole window; give one number, or set ratio_level=step"
        )


def _check_auto_mode(config: Config) -> None:
    actor, correction = config.actor, config.algorithm.rollout_correction
    if correction.mode != "auto":
        return
    key = f"{_CORRECTION}.bypass_mode='auto'"
    loss = resolve_loss(actor)
    if loss.ratio_limit(actor) is None:
        setting = "loss_mode" if loss.limit is None else loss.limit.key
        raise ConfigError(
            f"{key} measures noise in clip ranges, but actor.{setting}={getattr(actor, setting)!r} has none; set "
            "bypass_mode to true or false (`flowcorr audit` recommends one)"
        )
    if actor.old_policy == "behaviour" and config.rollout.max_weight_age:
        raise ConfigError(
            f"{key} compares the noise of both modes, but actor.old_policy='behaviour' leaves staleness out of the "
            "noise in decoupled mode; set old_policy: current, or bypass_mode: false"
        )


def _check_log_probs(config: Config) -> None:
    correction = config.algorithm.rollout_correction
    if config.rollout.calculate_log_probs or correction.mode == "off":
        return
    mode = "bypass mode" if correction.mode != "decoupled" else "rollout correction"
    raise ConfigError(
        f"rollout.calculate_log_probs=False leaves {mode} without the rollout's log-probs; "
        f"set rollout.calculate_log_probs=true, or {_CORRECTION}=null"
    )


def _check_mini_batches(config: Config) -> None:
    prompts, mini_batches = config.rollout.prompts_per_step, config.actor.mini_batches
    if prompts < mini_batches:
        raise ConfigError(
            f"actor.mini_batches={mini_batches} does not fit rollout.prompts_per_step={prompts}: the images of a "
            f"prompt are never split, so use at most {prompts} mini-batches, or more prompts"
        )


def _check_engine_counts(config: Config) -> None:
    if config.rollout.name != "vllm_omni":
        return
    for key in (*SEVERAL_GPUS, "max_num_seqs"):
        value = config.rollout.engine.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"rollout.engine.{key}={value!r} must be a whole number of at least 1; leave it out for vllm-omni's own"
            )


def _check_fsdp(config: Config) -> None:
    if not config.actor.fsdp:
        return
    in_process = resolve_engine(config.rollout.name).shares_weights and config.rollout.placement == "local"
    if not in_process and not config.model.lora.rank:
        raise ConfigError(
            f"actor.fsdp=True shards the weights, but rollout.name={config.rollout.name!r} with "
            f"placement={config.rollout.placement!r} needs whole ones; set name: in_process and placement: local, or "
            "fsdp: false, or train an adapter, which stays whole (model.lora.rank)"
        )
    if config.trainer.doctor is True:
        raise ConfigError(
            "trainer.doctor=True examines whole weights, but under actor.fsdp=True each rank holds a shard; run "
            "`flowcorr doctor` with actor.fsdp=false first"
        )


def _check_quantization(config: Config) -> None:
    model, quantization = config.model, config.model.quantization
    if quantization == "none":
        if config.trainer.eval_on == "both":
            raise ConfigError(
                "trainer.eval_on='both' evaluates on the quantized base and on the unquantized one, but "
                "model.quantization='none' trains on the unquantized one; set eval_on: trained, or quantize the base"
            )
        return
    key = f"model.quantization={quantization!r}"
    if not model.lora.rank:
        raise ConfigError(
            f"{key} keeps integers, which have no gradient, but model.lora.rank=0 trains all weights; train an "
            "adapter, or set quantization: none"
        )
    if config.actor.fsdp:
        raise ConfigError(
            f"{key} keeps integers and their scales, which FSDP2 cannot gather in the model's dtype; set "
            "actor.fsdp: false, or quantization: none"
        )
    if (quantization, model.dtype) == ("int8", "float16"):
        raise ConfigError(
            f"{key} multiplies integers of up to 127, whose sums overflow in model.dtype='float16'; set "
            "dtype: bfloat16, or quantization: nf4"
        )
    _check_bypass_of_coarse_weights(config)


def _check_bypass_of_coarse_weights(config: Config) -> None:
    actor, correction = config.actor, config.algorithm.rollout_correction
    if correction.mode != "bypass" or not trains_coarser(config, resolve_engine(config.rollout.name)):
        return
    limit = loss_of(actor, correction).ratio_limit(actor)
    smallest = min(limit) if isinstance(limit, Sequence) else limit
    needed = _CLIP_NEEDED[config.model.quantization]
    if smallest is not None and smallest < needed:
        raise ConfigError(
            f"{_CORRECTION}.bypass_mode=True compares weights in {config.model.quantization} with the engine's "
            f"unquantized ones: that moved ratios by up to {needed:g} where it was measured, and the loss clips them "
            f"at {smallest:g}; set bypass_mode: auto, which measures the noise of this run and bypasses only where it "
            "fits, or bypass_mode: false"
        )


def _check_unscaled(config: Config) -> None:
    if not config.sampling.cps_unscaled:
        return
    units = "sampling.cps_unscaled=True gives log-probs in units of 2 s^2 nats, but"
    scale = config.algorithm.rollout_correction.log_ratio_scale
    if scale in ("sqrt", "sum"):
        raise ConfigError(
            f"{units} {_CORRECTION}.log_ratio_scale={scale!r} takes them for nats; set cps_unscaled: false, or "
            "log_ratio_scale to mean or a number"
        )
    if resolve_loss(config.actor).adds_kl:
        raise ConfigError(
            f"{units} actor.loss_mode="
            f"{config.actor.loss_mode!r} adds a bias in nats to their differences; set cps_unscaled: false, or choose "
            "another loss_mode"
        )


def _check_kl_weighting(config: Config) -> None:
    actor, kind = config.actor, config.sampling.sde_type
    if actor.kl_coef and actor.kl_weighting == "flow_grpo" and kind != "sde":
        raise ConfigError(
            "actor.kl_weighting='flow_grpo' multiplies the KL by the length of a step, as recipes of sde steps do, but "
            f"sampling.sde_type={kind!r}, whose published KL is exact; set kl_weighting: exact"
        )


def _warn_of_rough_weights(config: Config) -> None:
    """A weight of 16 bits does not feel small updates, and gradients add up as coarsely."""
    model = config.model
    key = "model.lora.dtype" if model.lora.rank else "model.dtype"
    dtype = attrgetter(key)(config)
    if dtype in _SIGNIFICANT_BITS:
        bits = _SIGNIFICANT_BITS[dtype]
        trained = "the adapter" if model.lora.rank else "all weights"
        remedy = "" if model.lora.rank else " with actor.autocast=true"
        warnings.warn(
            f"{key}={dtype} trains {trained} with {bits} significant bits, so updates below a {2 ** (bits + 1)}th of a "
            "weight are lost; "
            f"set {key}=float32{remedy}",
            UserWarning,
            stacklevel=3,
        )


def _warn_of_bands_of_steps(config: Config) -> None:
    """Under a clip of the window's ratio one step may learn all of the range, but bands leave each an equal share."""
    correction, level = config.algorithm.rollout_correction, config.actor.ratio_level
    # Sums and means of log-ratios do not depend on which step learned; a maximum, or a sum of squares, does.
    modes = [
        one.name
        for one in correction.criteria
        if one.needs_batch and not (one.mode.level == "sample" and one.mode.bounds.is_band)
    ]
    if correction.mode in ("bypass", "auto") and level != "step" and modes:
        warnings.warn(
            f"{_CORRECTION}.rollout_rs={modes[0]} depends on single steps, and actor.ratio_level={level} clips the "
            "ratio of the window only, so its measured band may reject what a step has learned; set rollout_rs: "
            "seq_mean_k1 or seq_sum_k1",
            UserWarning,
            stacklevel=3,
        )


def _unused(config: Config) -> Iterator[tuple[str, str]]:
    """Keys without effect under this config, each with the reason."""
    yield from _unused_by_model(config)
    yield from _unused_by_loss(config)
    yield from _unused_by_placement(config)
    yield from _unused_by_staleness(config)
    sampling, data = config.sampling, config.data
    yield (
        "rollout.calculate_log_probs",
        "it is verl's key, and flowcorr's engines score their steps in any case",
    )
    if sampling.sde_type != "cps":
        yield "sampling.cps_unscaled", f"it belongs to sde_type=cps, and sde_type={sampling.sde_type}"
    if sampling.guidance_scale <= 1 and sampling.true_cfg_scale <= 1:
        yield "sampling.negative_prompt", "guidance is off"
    low, high = sampling.sde_window_range
    if sampling.sde_window_size in (1, high - low):
        yield (
            "sampling.sde_window_layout",
            f"windows of sampling.sde_window_size={sampling.sde_window_size} within "
            f"sampling.sde_window_range=[{low}, {high}] are the same in both layouts",
        )
    if sampling.sde_window_size == high - low and {*sampling.noisy_steps} <= {*range(low, high)}:
        yield "sampling.sde_noise_range", "the window holds all of these steps anyway"
    if data.path == "tiny_words":
        for key in ("heldout_path", "heldout_fraction", "target_field", "tag_field"):
            yield (
                f"data.{key}",
                "data.path=tiny_words has targets and a split of its own; set data.num_heldout",
            )
    else:
        yield "data.num_train", "it belongs to data.path=tiny_words; a file's prompts are all used"
        if all(path is None or path.endswith(".txt") for path in (data.path, data.heldout_path)):
            for key in ("target_field", "tag_field"):
                yield f"data.{key}", "a .txt file has no fields; it belongs to a .jsonl file"
        if data.heldout_path is not None:
            yield "data.heldout_fraction", f"data.heldout_path={data.heldout_path} has the held-out prompts"


def _unused_by_model(config: Config) -> Iterator[tuple[str, str]]:
    model = config.model
    if config.trainer.device == "cpu":
        yield "model.offload_text_encoders", "trainer.device=cpu has no other memory"
    if model.lora.rank == 0:
        for key in ("alpha", "targets", "dtype", "init"):
            yield f"model.lora.{key}", "model.lora.rank=0 trains all weights, without an adapter"


def _unused_by_placement(config: Config) -> Iterator[tuple[str, str]]:
    if not config.reward.gold:
        yield "reward.gold_every", "reward.gold is empty"
    placements = {"rollout": config.rollout.placement, "reward": config.reward.placement}
    for section, placement in placements.items():
        if placement != "ray":
            for key in ("num_workers", "worker_resources"):
                yield f"{section}.{key}", f"{section}.placement={placement} has no workers"
    engine = resolve_engine(config.rollout.name)
    if not engine.takes_options:
        yield "rollout.engine", f"rollout.name={config.rollout.name} has no options"
    if config.rollout.placement == "local":
        yield "rollout.scheduling", "rollout.placement=local has no workers"
        if not engine.own_processes:
            yield "rollout.timeout", "rollout.placement=local has no workers"
    if "ray" not in placements.values():
        yield "rollout.ray_address", "neither rollout.placement nor reward.placement is ray"


def _unused_by_staleness(config: Config) -> Iterator[tuple[str, str]]:
    correction = config.algorithm.rollout_correction
    if not config.rollout.max_weight_age:
        reason = "rollout.staleness=0 and rollout.max_staleness=0 leave no weights but the current ones to sample with"
        yield "rollout.drift_every", reason
        yield "actor.old_policy", reason
        return
    if correction.mode == "off":
        yield "rollout.drift_every", f"{_CORRECTION}=null measures nothing"
    elif correction.mode == "bypass":
        yield "actor.old_policy", "in bypass mode the rollout's own log-probs are the old ones"


def _unused_by_loss(config: Config) -> Iterator[tuple[str, str]]:
    actor, correction = config.actor, config.algorithm.rollout_correction
    if actor.lr_schedule == "constant":
        yield "actor.lr_min_ratio", "actor.lr_schedule=constant does not fall"
    updates = config.trainer.total_steps * actor.epochs * actor.mini_batches
    if actor.warmup_steps >= updates:
        yield (
            "actor.lr_schedule",
            f"actor.warmup_steps={actor.warmup_steps} lasts for all {updates} updates of the run",
        )
    if config.sampling.sde_window_size == 1:
        yield "actor.ratio_level", "sampling.sde_window_size=1 has one step in a window"
    if actor.kl_coef == 0:
        yield "actor.kl_weighting", "actor.kl_coef=0"
    loss = loss_of(actor, correction)
    if loss.adds_kl and correction.mode == "bypass":
        yield (
            f"{_CORRECTION}.score_centering",
            f"actor.loss_mode={actor.loss_mode} is centred at the policy of its old log-probs, which are the rollout's",
        )
    if loss.reads is None:
        return
    chosen_by = f"actor.loss_mode={actor.loss_mode}"
    if loss.from_correction:
        chosen_by = f"{_CORRECTION}.loss_type={correction.loss_type}"
    for key in sorted(LOSS_KEYS - set(loss.reads)):
        yield f"actor.{key}", f"{chosen_by} does not read it"
