"""The table for flow_grpo's configuration, a `ConfigDict` of a Python file.

Each model has a training script of its own, and each script reads other keys: windows are only drawn by those whose
name ends in `_fast`, and by that of Qwen-Image. `with_script` names the script by the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flowcorr.config.families import find_family
from flowcorr.config.layers import JOINT_ATTENTION, JOINT_FEED_FORWARD
from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.translate import rewards
from flowcorr.translate.families import require_family
from flowcorr.translate.rewards import Reward
from flowcorr.translate.table import (
    ALL_PROMPTS,
    WHOLE_RUN,
    Given,
    Left,
    Row,
    Table,
    decay_of_one,
    dtype_of,
    too_small,
    under,
)

_ABSENT: dict[str, Any] = {
    "gpus": None,
    "rationorm": False,
    "activation_checkpointing": False,
    "sample.sde_window_size": 0,
    "sample.sde_window_range": None,
    "sample.sde_type": "sde",
    "sample.same_latent": False,
    "train.algorithm": "grpo",
    "train.lora_path": None,
    "train.ema": False,
}
"""Keys that not every version of flow_grpo has, with the values that count without them."""
_SCRIPTS = (
    *("train_sd3.py", "train_sd3_fast.py", "train_sd3_GRPO_Guard.py", "train_flux.py", "train_flux_fast.py"),
    "train_qwenimage.py",
)
_ADAPTERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "sd3": (32, ()),
    "flux": (64, JOINT_FEED_FORWARD),
    "qwen_image": (
        64,
        ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    ),
}
"""The rank of a script's adapter, and its layers besides those of attention."""
_EMA_DECAY, _EMA_INTERVAL = 0.9, 8
_KNOWN = {
    "ocr": rewards.OCR,
    "pickscore": rewards.PICKSCORE,
    "jpeg_compressibility": rewards.JPEG,
    "aesthetic": rewards.AESTHETIC,
}


def with_script(values: Mapping[str, Any], name: str, gpus: int | None) -> dict[str, Any]:
    """The configuration with `gpus` and the training script that reads it, by its keys and its name.

    Raises:
        ConfigError: its model is not translated, or two scripts may read it, which draw other windows.
    """
    family = require_family("pretrained.model", str(values["pretrained"]["model"]), tuple(_ADAPTERS))
    sample = values.get("sample") or {}
    script = values.get("script")
    if script is None:
        model = "flux" if family == "flux" else "sd3"
        fast = "fast" in name or "sde_type" in sample
        if family == "qwen_image":
            script = "train_qwenimage.py"
        elif values.get("rationorm"):
            script = "train_sd3_GRPO_Guard.py"
        elif sample.get("sde_window_size") and not fast:
            raise ConfigError(
                f"sample.sde_window_size={sample['sde_window_size']} is read by train_{model}_fast.py and not by "
                f"train_{model}.py; say which one runs it, script=train_{model}.py or script=train_{model}_fast.py"
            )
        else:
            script = f"train_{model}{'_fast' if fast else ''}.py"
    if script not in _SCRIPTS:
        raise ConfigError(unknown_choice("script", script, _SCRIPTS))
    return {**values, "script": script} | ({} if gpus is None else {"gpus": gpus})


def _family(get: Given) -> str:
    return require_family("pretrained.model", get("pretrained.model", str), tuple(_ADAPTERS))


def _window(get: Given, *, drawn: bool) -> tuple[int, list[int]]:
    """Size and range of the SDE window; without a window, all steps that are trained on."""
    steps = get("sample.num_steps", int)
    if drawn and get("sample.sde_window_size", int) > 0:
        return get("sample.sde_window_size", int), get("sample.sde_window_range", list | None) or [0, 5]
    trained = steps - 1 if drawn else int(steps * get("train.timestep_fraction", float))
    return trained, [0, trained]


def _foreign(get: Given) -> str:
    """Why flowcorr has no such trainer, or an empty string; raises `ConfigError` for a model without a family."""
    _family(get)
    algorithm = get("train.algorithm")
    if algorithm != "grpo":
        return f"train.algorithm={algorithm} has no equivalent here; flowcorr has only policy gradients"
    return ""


def _refuse(get: Given) -> str:
    family = _family(get)
    if get("prompt_fn") not in ("general_ocr", "geneval"):
        return f"prompt_fn={get('prompt_fn')} reads no prompts of images from a file, as general_ocr and geneval do"
    if not get("use_lora") and get("mixed_precision") == "fp16":
        return "use_lora=False with mixed_precision=fp16 has no equivalent here; flowcorr casts all weights to bfloat16"
    if not get("per_prompt_stat_tracking"):
        return (
            "per_prompt_stat_tracking=False compares images of all prompts, but flowcorr those of one prompt"
        )
    if not get("train.cfg") and get("sample.guidance_scale", float) > 1 and family == "sd3":
        return "train.cfg=False trains without the guidance that it samples with, but flowcorr trains what it samples"
    if get("gpus") is None:
        return (
            "it does not hold the number of GPUs, which decides the prompts per step; give it with --gpus N"
        )
    per_step = ("gpus", *under("sample", "train_batch_size num_batches_per_epoch"))
    counts = (*per_step, "train.gradient_accumulation_steps")
    if reason := too_small(get, counts, "sample.num_image_per_prompt"):
        return reason
    gpus, batch, batches, accumulated = (get(key, int) for key in counts)
    images = get("sample.num_image_per_prompt", int)
    if gpus * batch % images:
        return (
            f"{gpus} GPUs x sample.train_batch_size={batch} images are no multiple of "
            f"sample.num_image_per_prompt={images}, as flow_grpo needs; give the right number of GPUs with --gpus N"
        )
    if batches % accumulated:
        return (
            f"sample.num_batches_per_epoch={batches} is no multiple of train.gradient_accumulation_steps={accumulated}"
            ", so that updates would mix steps"
        )
    return ""


def _rows(get: Given) -> dict[str, str | Row]:
    family, script, adapted = _family(get), get("script"), get("use_lora")
    dtype = dtype_of(get, "mixed_precision")
    # Full weights are trained in float32, except for Qwen-Image.
    weights_dtype = dtype if adapted or family == "qwen_image" else "float32"
    rank, other_layers = _ADAPTERS[family]
    # Only scripts named `*_fast.py` read the transition.
    sde_type = str(get("sample.sde_type")) if script.endswith("_fast.py") else "sde"
    draws_windows = script.endswith(("_fast.py", "qwenimage.py"))
    window_size, window_range = _window(get, drawn=draws_windows)
    steps, guidance = get("sample.num_steps", int), get("sample.guidance_scale", float)
    batches, accumulated = (
        get("sample.num_batches_per_epoch", int),
        get("train.gradient_accumulation_steps", int),
    )
    images = get("gpus", int) * get("sample.train_batch_size", int) * batches
    # The scripts average every eighth update, once for each of its batches.
    averages = get("train.ema") and script != "train_qwenimage.py"
    functions = [
        Reward(name=name, known=_KNOWN.get(name), weight=rewards.number(f"reward_fn.{name}", weight))
        for name, weight in get("reward_fn", dict).items()
    ]
    dataset = get("dataset", str)
    prompts_file = "{}_metadata.jsonl" if get("prompt_fn") == "geneval" else "{}.txt"
    return {
        "model.path": "pretrained.model",
        "model.dtype": Row(
            ("mixed_precision", "use_lora"),
            weights_dtype,
            "of float32 weights in autocast there, of the weights themselves here" if adapted else "",
        ),
        "model.max_sequence_length": Row((), 512 if family == "qwen_image" else 128),
        "model.lora.rank": Row("use_lora", rank if adapted else 0),
        "model.lora.alpha": Row((), 2.0 * rank if adapted else None),
        "model.lora.targets": Row((), [*JOINT_ATTENTION, *other_layers] if adapted else None),
        "model.lora.warm_start": "train.lora_path",
        "sampling.sde_type": Row("sample.sde_type", sde_type),
        "sampling.cps_unscaled": Row((), sde_type == "cps", "its cps log-probs lack 1 / (2 s^2)"),
        "sampling.noise_level": "sample.noise_level",
        "sampling.num_inference_steps": "sample.num_steps",
        "sampling.sde_window_size": Row(
            ("sample.sde_window_size", "train.timestep_fraction"),
            window_size,
            f"{script} draws one window for each batch"
            if draws_windows
            else f"{script} draws no windows: it trains on the first timestep_fraction of the steps",
        ),
        "sampling.sde_window_range": Row("sample.sde_window_range", window_range),
        "sampling.sde_noise_range": Row(
            "train.timestep_fraction",
            None if draws_windows or steps <= window_size else [0, steps],
            "noise in every step, trained on or not",
        ),
        f"sampling.{find_family(family).guidance_key}": Row("sample.guidance_scale", guidance),
        "sampling.negative_prompt": Row((), " " if family == "qwen_image" and guidance > 1 else ""),
        "sampling.height": "resolution",
        "sampling.width": "resolution",
        "rollout.dtype": Row("mixed_precision", dtype),
        "rollout.prompts_per_step": Row(
            ("gpus", "sample.train_batch_size", "sample.num_batches_per_epoch"),
            images // get("sample.num_image_per_prompt", int),
            "GPUs * batch * batches / images per prompt",
        ),
        "rollout.n": "sample.num_image_per_prompt",
        "rollout.batch_size": "sample.train_batch_size",
        "rollout.same_initial_noise": "sample.same_latent",
        "actor.loss_mode": Row("rationorm", "grpo_guard" if get("rationorm") else "flow_grpo"),
        "actor.clip_ratio": "train.clip_range",
        "actor.adv_clip_max": "train.adv_clip_max",
        "actor.kl_coef": "train.beta",
        "actor.kl_weighting": Row(
            (),
            "flow_grpo" if get("train.beta") and sde_type == "sde" else "exact",
            "its KL of sde steps is divided by the length of a step, that of cps steps is exact",
        ),
        "actor.optimizer": Row(
            "train.use_8bit_adam",
            "adamw_8bit" if get("train.use_8bit_adam") else "adamw",
            "AdamW of bitsandbytes in both",
        ),
        "actor.lr": "train.learning_rate",
        "actor.betas": Row(
            ("train.adam_beta1", "train.adam_beta2"), [get("train.adam_beta1"), get("train.adam_beta2")]
        ),
        "actor.weight_decay": "train.adam_weight_decay",
        "actor.eps": "train.adam_epsilon",
        "actor.grad_clip": "train.max_grad_norm",
        "actor.epochs": "train.num_inner_epochs",
        "actor.mini_batches": Row(
            "train.gradient_accumulation_steps",
            batches // accumulated,
            "updates per step: batches / gradient_accumulation_steps; groups are never split here",
        ),
        "actor.micro_batch_size": "train.batch_size",
        "actor.autocast": Row("mixed_precision", weights_dtype == "float32" and dtype == "bfloat16"),
        "actor.gradient_checkpointing": "activation_checkpointing",
        "actor.ema": Row(
            "train.ema",
            decay_of_one(_EMA_DECAY, _EMA_INTERVAL / accumulated) if averages else None,
            f"{_EMA_DECAY} there at every {_EMA_INTERVAL}th update, once for each of its batches; here of one update",
        ),
        "algorithm.advantage_std": Row(
            "sample.global_std", "global" if get("sample.global_std") else "group"
        ),
        "algorithm.rollout_correction.bypass_mode": Row((), True, "old log-probs are the rollout's"),
        "reward.terms": Row("reward_fn", rewards.terms(functions), rewards.note(functions)),
        "data.path": Row(("dataset", "prompt_fn"), os.path.join(dataset, prompts_file.format("train"))),
        "data.heldout_path": Row(
            ("dataset", "prompt_fn"), os.path.join(dataset, prompts_file.format("test"))
        ),
        "data.num_heldout": Row((), ALL_PROMPTS, "all of them are evaluated"),
        "trainer.total_steps": Row(
            (), WHOLE_RUN, "it trains until it is stopped; a lower number ends the run"
        ),
        "trainer.seed": "seed",
        "trainer.eval_every": Row("eval_freq", get("eval_freq"), "epochs"),
        "trainer.eval_num_inference_steps": "sample.eval_num_steps",
        "trainer.save_every": Row("save_freq", get("save_freq"), "epochs"),
        "trainer.keep_checkpoints": "num_checkpoint_limit",
        "trainer.trackers": Row((), ["wandb"]),
    }


_LEFT = (
    Left(
        "sample.eval_guidance_scale", "evaluations use the guidance of sampling", like="sample.guidance_scale"
    ),
    Left(
        "train.clip_range_*", "both sides of the clip range are actor.clip_ratio's", like="train.clip_range"
    ),
    Left("resume_from", "start from the weights of a run by model.lora.warm_start"),
    Left("allow_tf32", "what is computed in float32 is not rounded to TF32"),
    Left("prompt_fn_kwargs*", "prompts come from the file data.path"),
    Left("pretrained.revision", "flowcorr loads the newest revision", ("main",)),
)

TABLE = Table(
    name="flow_grpo",
    required=(
        *(
            "pretrained.model",
            "resolution",
            "mixed_precision",
            "use_lora",
            "dataset",
            "prompt_fn",
            "reward_fn",
        ),
        *under("sample", "num_steps num_image_per_prompt num_batches_per_epoch"),
        "train.learning_rate",
    ),
    absent=_ABSENT,
    foreign=_foreign,
    only={},
    refuse=_refuse,
    rows=_rows,
    left=_LEFT,
    apart=(
        *("save_dir", "logdir", "run_name", "run_project", "num_epochs", "debug", "script"),
        "fsdp_optimizer_offload",
        *("sample.test_batch_size", "train.timestep_shift"),  # no script of these models reads the second
    ),
    differences=(
        "flow_grpo's advantages use the population std, which is sqrt((n - 1) / n) of the std here",
        "flow_grpo leaves samples with advantage 0 out of the mean of the loss; here they count",
        "flow_grpo's GRPO-Guard averages std and step over the batch; here each sample has its own",
        "flow_grpo begins its average with decays below 0.9, (1 + n) / (10 + n) at update n; here it is one "
        "from the start",
    ),
)
