"""The table for flow_grpo's configuration, a `ConfigDict` of a Python file.

Each model has a training script of its own, and each script reads other keys: windows are only drawn by those whose
name ends in `_fast`, and by that of Qwen-Image. `as_script` names the script by the configuration.
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
from flowcorr.translate.table import Given, Left, Row, Table, decay_of_one, dtype_of

_REQUIRED = (
    *("pretrained.model", "resolution", "mixed_precision", "use_lora", "dataset", "prompt_fn", "reward_fn"),
    *(
        "sample.num_steps",
        "sample.num_image_per_prompt",
        "sample.num_batches_per_epoch",
        "train.learning_rate",
    ),
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
_RANKS = {"sd3": 32, "flux": 64, "qwen_image": 64}
_LAYERS = {
    "sd3": (),
    "flux": JOINT_FEED_FORWARD,
    "qwen_image": ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
}
"""Layers that a script's adapter has besides those of attention."""
_EMA_DECAY, _EMA_INTERVAL = 0.9, 8
_WHOLE_RUN = 100_000
_ALL_PROMPTS = 100_000
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
    family = require_family("pretrained.model", str(values["pretrained"]["model"]), tuple(_RANKS))
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
                f"train_{model}.py; say which one runs it: script=train_{model}_fast.py"
            )
        else:
            script = f"train_{model}{'_fast' if fast else ''}.py"
    if script not in _SCRIPTS:
        raise ConfigError(unknown_choice("script", script, _SCRIPTS))
    return {**values, "script": script} | ({} if gpus is None else {"gpus": gpus})


def _family(get: Given) -> str:
    return require_family("pretrained.model", get("pretrained.model", str), tuple(_RANKS))


def _draws_windows(get: Given) -> bool:
    return get("script").endswith(("_fast.py", "qwenimage.py"))


def _prompts(get: Given) -> float:
    images = get("gpus", int) * get("sample.train_batch_size", int) * get("sample.num_batches_per_epoch", int)
    return images / get("sample.num_image_per_prompt", int)


def _updates(get: Given) -> int:
    """Optimizer updates a step."""
    return get("sample.num_batches_per_epoch", int) // get("train.gradient_accumulation_steps", int)


def _window(get: Given) -> tuple[int, list[int]]:
    """Size and range of the SDE window; without a window, all steps that are trained on."""
    steps = get("sample.num_steps", int)
    if _draws_windows(get) and get("sample.sde_window_size", int) > 0:
        return get("sample.sde_window_size", int), get("sample.sde_window_range", list | None) or [0, 5]
    trained = steps - 1 if _draws_windows(get) else int(steps * get("train.timestep_fraction", float))
    return trained, [0, trained]


def _sde_type(get: Given) -> str:
    """The transition; only scripts named `*_fast.py` read it."""
    return str(get("sample.sde_type")) if get("script").endswith("_fast.py") else "sde"


def _noise_range(get: Given) -> list[int] | None:
    """A script without windows adds noise in every step, trained on or not."""
    steps = get("sample.num_steps", int)
    return None if _draws_windows(get) or steps <= _window(get)[0] else [0, steps]


def _dtype(get: Given) -> str:
    return dtype_of(get, "mixed_precision")


def _weights_dtype(get: Given) -> str:
    """The dtype of the weights; full weights are trained in float32, except for Qwen-Image."""
    return _dtype(get) if get("use_lora") or _family(get) == "qwen_image" else "float32"


def _ema(get: Given) -> float | None:
    """The decay of one update: the scripts average every eighth update, once for each of its batches."""
    if not get("train.ema") or get("script") == "train_qwenimage.py":
        return None
    return decay_of_one(_EMA_DECAY, _EMA_INTERVAL / get("train.gradient_accumulation_steps", int))


def _rewards(get: Given) -> list[Reward]:
    return [
        Reward(name=name, known=_KNOWN.get(name), weight=rewards.number(f"reward_fn.{name}", weight))
        for name, weight in get("reward_fn", dict).items()
    ]


def _prompts_file(get: Given, split: str) -> str:
    name = f"{split}_metadata.jsonl" if get("prompt_fn") == "geneval" else f"{split}.txt"
    return os.path.join(get("dataset", str), name)


def _refuse(get: Given) -> str:
    family, algorithm = _family(get), get("train.algorithm")
    if algorithm != "grpo":
        return f"train.algorithm={algorithm} has no equivalent here; flowcorr has only policy gradients"
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
    for key in (
        "gpus",
        "train.gradient_accumulation_steps",
        "sample.train_batch_size",
        "sample.num_batches_per_epoch",
    ):
        if get(key, int) < 1:
            return f"{key}={get(key)} must be at least 1"
    if get("sample.num_image_per_prompt", int) < 2:
        return (
            f"sample.num_image_per_prompt={get('sample.num_image_per_prompt')} gives an image no other to be compared "
            "with; use 2 or more"
        )
    return _refuse_numbers(get)


def _refuse_numbers(get: Given) -> str:
    gpus, batch, images = (
        get("gpus", int),
        get("sample.train_batch_size", int),
        get("sample.num_image_per_prompt", int),
    )
    if gpus * batch % images:
        return (
            f"{gpus} GPUs x sample.train_batch_size={batch} images are no multiple of "
            f"sample.num_image_per_prompt={images}, as flow_grpo needs; give the right number of GPUs with --gpus N"
        )
    batches, accumulated = (
        get("sample.num_batches_per_epoch", int),
        get("train.gradient_accumulation_steps", int),
    )
    if batches % accumulated:
        return (
            f"sample.num_batches_per_epoch={batches} is no multiple of train.gradient_accumulation_steps={accumulated}"
            ", so that updates would mix steps"
        )
    return ""


ROWS = (
    Row("pretrained.model", "model.path"),
    Row(
        ("mixed_precision", "use_lora"),
        "model.dtype",
        _weights_dtype,
        lambda get: (
            "of float32 weights in autocast there, of the weights themselves here" if get("use_lora") else ""
        ),
    ),
    Row((), "model.max_sequence_length", lambda get: 512 if _family(get) == "qwen_image" else 128),
    Row("use_lora", "model.lora.rank", lambda get: _RANKS[_family(get)] if get("use_lora") else 0),
    Row((), "model.lora.alpha", lambda get: 2.0 * _RANKS[_family(get)], when=lambda get: get("use_lora")),
    Row(
        (),
        "model.lora.targets",
        lambda get: [*JOINT_ATTENTION, *_LAYERS[_family(get)]],
        when=lambda get: get("use_lora"),
    ),
    Row("train.lora_path", "model.lora.warm_start"),
    Row("sample.sde_type", "sampling.sde_type", _sde_type),
    Row(
        (),
        "sampling.cps_unscaled",
        lambda get: True,
        "its cps log-probs lack 1 / (2 s^2)",
        when=lambda get: _sde_type(get) == "cps",
    ),
    Row("sample.noise_level", "sampling.noise_level"),
    Row("sample.num_steps", "sampling.num_inference_steps"),
    Row(
        ("sample.sde_window_size", "train.timestep_fraction"),
        "sampling.sde_window_size",
        lambda get: _window(get)[0],
        lambda get: (
            f"{get('script')} draws one window for each batch"
            if _draws_windows(get)
            else f"{get('script')} draws no windows: it trains on the first timestep_fraction of the steps"
        ),
    ),
    Row("sample.sde_window_range", "sampling.sde_window_range", lambda get: _window(get)[1]),
    Row(
        "train.timestep_fraction",
        "sampling.sde_noise_range",
        _noise_range,
        "noise in every step, trained on or not",
    ),
    Row(
        "sample.guidance_scale",
        "sampling.guidance_scale",
        lambda get: get("sample.guidance_scale", float),
        when=lambda get: find_family(_family(get)).guidance_key == "guidance_scale",
    ),
    Row(
        "sample.guidance_scale",
        "sampling.true_cfg_scale",
        lambda get: get("sample.guidance_scale", float),
        when=lambda get: find_family(_family(get)).guidance_key == "true_cfg_scale",
    ),
    Row(
        (),
        "sampling.negative_prompt",
        lambda get: " ",
        when=lambda get: _family(get) == "qwen_image" and get("sample.guidance_scale", float) > 1,
    ),
    Row("resolution", "sampling.height"),
    Row("resolution", "sampling.width"),
    Row("mixed_precision", "rollout.dtype", _dtype),
    Row(
        ("gpus", "sample.train_batch_size", "sample.num_batches_per_epoch"),
        "rollout.prompts_per_step",
        lambda get: round(_prompts(get)),
        "GPUs * batch * batches / images per prompt",
    ),
    Row("sample.num_image_per_prompt", "rollout.n"),
    Row("sample.train_batch_size", "rollout.batch_size"),
    Row("sample.same_latent", "rollout.same_initial_noise"),
    Row("rationorm", "actor.loss_mode", lambda get: "grpo_guard" if get("rationorm") else "flow_grpo"),
    Row("train.clip_range", "actor.clip_ratio"),
    Row("train.adv_clip_max", "actor.adv_clip_max"),
    Row("train.beta", "actor.kl_coef"),
    Row(
        (),
        "actor.kl_weighting",
        lambda get: "flow_grpo",
        "its KL of sde steps is divided by the length of a step, that of cps steps is exact",
        when=lambda get: get("train.beta") and _sde_type(get) == "sde",
    ),
    Row(
        "train.use_8bit_adam",
        "actor.optimizer",
        lambda get: "adamw_8bit" if get("train.use_8bit_adam") else "adamw",
        "AdamW of bitsandbytes in both",
    ),
    Row("train.learning_rate", "actor.lr"),
    Row(
        ("train.adam_beta1", "train.adam_beta2"),
        "actor.betas",
        lambda get: [get("train.adam_beta1"), get("train.adam_beta2")],
    ),
    Row("train.adam_weight_decay", "actor.weight_decay"),
    Row("train.adam_epsilon", "actor.eps"),
    Row("train.max_grad_norm", "actor.grad_clip"),
    Row("train.num_inner_epochs", "actor.epochs"),
    Row(
        "train.gradient_accumulation_steps",
        "actor.mini_batches",
        _updates,
        "updates per step: batches / gradient_accumulation_steps; groups are never split here",
    ),
    Row("train.batch_size", "actor.micro_batch_size"),
    Row(
        "mixed_precision",
        "actor.autocast",
        lambda get: _weights_dtype(get) == "float32" and _dtype(get) == "bfloat16",
    ),
    Row("activation_checkpointing", "actor.gradient_checkpointing"),
    Row(
        "train.ema",
        "actor.ema",
        _ema,
        f"{_EMA_DECAY} there at every {_EMA_INTERVAL}th update, once for each of its batches; here of one update",
    ),
    Row(
        "sample.global_std",
        "algorithm.advantage_std",
        lambda get: "global" if get("sample.global_std") else "group",
    ),
    Row((), "algorithm.rollout_correction.bypass_mode", lambda get: True, "old log-probs are the rollout's"),
    Row(
        "reward_fn",
        "reward.terms",
        lambda get: rewards.terms(_rewards(get)),
        lambda get: rewards.note(_rewards(get)),
    ),
    Row(("dataset", "prompt_fn"), "data.path", lambda get: _prompts_file(get, "train")),
    Row(("dataset", "prompt_fn"), "data.heldout_path", lambda get: _prompts_file(get, "test")),
    Row((), "data.num_heldout", lambda get: _ALL_PROMPTS, "all of them are evaluated"),
    Row(
        (),
        "trainer.total_steps",
        lambda get: _WHOLE_RUN,
        "it trains until it is stopped; a lower number ends the run",
    ),
    Row("seed", "trainer.seed"),
    Row("eval_freq", "trainer.eval_every", None, "epochs"),
    Row("sample.eval_num_steps", "trainer.eval_num_inference_steps"),
    Row("save_freq", "trainer.save_every", None, "epochs"),
    Row("num_checkpoint_limit", "trainer.keep_checkpoints"),
    Row((), "trainer.trackers", lambda get: ["wandb"]),
)

LEFT = (
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
APART = (
    *("sample.test_batch_size", "train.timestep_shift"),  # no script of these models reads the second
    *(
        "save_dir",
        "logdir",
        "run_name",
        "run_project",
        "num_epochs",
        "debug",
        "script",
    ),
    "fsdp_optimizer_offload",
)

DIFFERENCES = (
    "flow_grpo's advantages use the population std, which is sqrt((n - 1) / n) of the std here",
    "flow_grpo leaves samples with advantage 0 out of the mean of the loss; here they count",
    "flow_grpo's GRPO-Guard averages std and step over the batch; here each sample has its own",
    "flow_grpo begins its average with decays below 0.9, (1 + n) / (10 + n) at update n; here it is one from the start",
)

TABLE = Table(
    name="flow_grpo",
    required=_REQUIRED,
    absent=_ABSENT,
    only={},
    refuse=_refuse,
    rows=ROWS,
    left=LEFT,
    apart=APART,
    differences=DIFFERENCES,
)
