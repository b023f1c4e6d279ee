"""The table for flow_grpo's configuration, a `ConfigDict` of a Python file.

Each model has a training script of its own, and each script reads other keys: windows are only drawn by those whose
name ends in `_fast`, and by that of Qwen-Image. `as_script` names the script by the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flowcorr.errors import ConfigError, unknown_choice
from flowcorr.models import ModelFamily
from flowcorr.translate import rewards
from flowcorr.translate.families import family_of, not_known
from flowcorr.translate.rewards import Given
from flowcorr.translate.table import Get, Row, Table, decay_of_one, same

SCRIPT = "script"
_BASE: dict[str, Any] = {
    "pretrained.model": "runwayml/stable-diffusion-v1-5",
    "seed": 42,
    "resolution": 768,
    "mixed_precision": "fp16",
    "use_lora": True,
    "dataset": "",
    "reward_fn": {},
    "save_freq": 20,
    "eval_freq": 20,
    "num_checkpoint_limit": 5,
    "per_prompt_stat_tracking": True,
    "prompt_fn": "imagenet_animals",
    "sample.num_steps": 40,
    "sample.eval_num_steps": 40,
    "sample.guidance_scale": 4.5,
    "sample.train_batch_size": 1,
    "sample.num_image_per_prompt": 1,
    "sample.num_batches_per_epoch": 2,
    "sample.global_std": True,
    "sample.noise_level": 0.7,
    "train.batch_size": 1,
    "train.learning_rate": 3e-4,
    "train.use_8bit_adam": False,
    "train.adam_beta1": 0.9,
    "train.adam_beta2": 0.999,
    "train.adam_weight_decay": 1e-4,
    "train.adam_epsilon": 1e-8,
    "train.gradient_accumulation_steps": 1,
    "train.max_grad_norm": 1.0,
    "train.num_inner_epochs": 1,
    "train.cfg": True,
    "train.adv_clip_max": 5.0,
    "train.clip_range": 1e-4,
    "train.timestep_fraction": 1.0,
    "train.beta": 0.0,
    "train.ema": False,
}
"""The keys in `config/base.py` of every revision, with their values."""
DEFAULTS: dict[str, Any] = _BASE | {
    "gpus": None,
    SCRIPT: "train_sd3.py",
    "rationorm": False,
    "activation_checkpointing": False,
    "sample.sde_window_size": 0,
    "sample.sde_window_range": None,
    "sample.sde_type": "sde",
    "sample.same_latent": False,
    "train.algorithm": "grpo",
    "train.lora_path": None,
}
KINDS: dict[str, type] = {"gpus": int, "sample.sde_window_range": list, "train.lora_path": str}
_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
_RANKS = {"sd3": 32, "flux": 64, "qwen_image": 64}
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_LAYERS = {
    "sd3": (),
    "flux": ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
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


def as_script(given: Mapping[str, Any], function: str) -> str:
    """The training script of a configuration, by its keys and the name of its function."""
    family = family_of(str(given.get("pretrained.model", "")))
    if family is not None and family.name == "qwen_image":
        return "train_qwenimage.py"
    if given.get("rationorm"):
        return "train_sd3_GRPO_Guard.py"
    fast = "_fast" if "fast" in function or "sample.sde_type" in given else ""
    return f"train_{'flux' if family is not None and family.name == 'flux' else 'sd3'}{fast}.py"


def _family(get: Get) -> type[ModelFamily]:
    family = family_of(get("pretrained.model"))
    assert family is not None, "a configuration of another family has been refused"
    return family


def _draws_windows(get: Get) -> bool:
    return get(SCRIPT).endswith(("_fast.py", "qwenimage.py"))


def _prompts(get: Get) -> float:
    images = get("gpus") * get("sample.train_batch_size") * get("sample.num_batches_per_epoch")
    return images / get("sample.num_image_per_prompt")


def _updates(get: Get) -> int:
    """Optimizer updates a step."""
    return get("sample.num_batches_per_epoch") // get("train.gradient_accumulation_steps")


def _window(get: Get) -> tuple[int, list[int]]:
    """Size and range of the SDE window; without a window, all steps that are trained on."""
    steps = get("sample.num_steps")
    if _draws_windows(get) and get("sample.sde_window_size") > 0:
        return get("sample.sde_window_size"), list(get("sample.sde_window_range") or (0, 5))
    trained = steps - 1 if _draws_windows(get) else int(steps * get("train.timestep_fraction"))
    return trained, [0, trained]


def _sde_type(get: Get) -> str:
    """The transition; only scripts whose name ends in `_fast` read it."""
    return str(get("sample.sde_type")) if get(SCRIPT).endswith("_fast.py") else "sde"


def _noise_range(get: Get) -> list[int] | None:
    """A script without windows adds noise in every step, trained on or not."""
    steps = get("sample.num_steps")
    return None if _draws_windows(get) or steps <= _window(get)[0] else [0, steps]


def _dtype(get: Get) -> str:
    """The dtype that its script computes in; raises `ConfigError` for one that flowcorr does not have."""
    name = get("mixed_precision")
    if name not in _DTYPES:
        raise ConfigError(unknown_choice("mixed_precision", name, _DTYPES))
    return _DTYPES[name]


def _weights_dtype(get: Get) -> str:
    """The dtype of the weights; all of them are trained in float32, but those of Qwen-Image."""
    return _dtype(get) if get("use_lora") or _family(get).name == "qwen_image" else "float32"


def _ema(get: Get) -> float | None:
    """The decay of one update: the scripts average every eighth update, once for each of its batches."""
    if not get("train.ema") or get(SCRIPT) == "train_qwenimage.py":
        return None
    return decay_of_one(_EMA_DECAY, _EMA_INTERVAL / get("train.gradient_accumulation_steps"))


def _rewards(get: Get) -> list[Given]:
    return [
        Given(name=name, known=_KNOWN.get(name), weight=rewards.number(f"reward_fn.{name}", weight))
        for name, weight in get("reward_fn").items()
    ]


def _prompts_file(get: Get, split: str) -> str:
    name = f"{split}_metadata.jsonl" if get("prompt_fn") == "geneval" else f"{split}.txt"
    return os.path.join(get("dataset"), name)


def _refuse(get: Get) -> str:
    model, algorithm = get("pretrained.model"), get("train.algorithm")
    family = family_of(model)
    if family is None or family.name not in _RANKS:
        return not_known("pretrained.model", model)
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
    if not get("train.cfg") and get("sample.guidance_scale") > 1 and family.name == "sd3":
        return "train.cfg=False trains without the guidance that it samples with, but flowcorr trains what it samples"
    if get("gpus") is None:
        return "the file does not contain the number of GPUs, which decides the prompts per step; give it with --gpus N"
    for key in (
        "gpus",
        "train.gradient_accumulation_steps",
        "sample.train_batch_size",
        "sample.num_batches_per_epoch",
    ):
        if get(key) < 1:
            return f"{key}={get(key)} must be at least 1"
    if get("sample.num_image_per_prompt") < 2:
        return (
            f"sample.num_image_per_prompt={get('sample.num_image_per_prompt')} gives an image no other to be compared "
            "with; use 2 or more"
        )
    return _refuse_numbers(get)


def _refuse_numbers(get: Get) -> str:
    gpus, batch, images = get("gpus"), get("sample.train_batch_size"), get("sample.num_image_per_prompt")
    if gpus * batch % images:
        return (
            f"{gpus} GPUs x sample.train_batch_size={batch} images are no multiple of "
            f"sample.num_image_per_prompt={images}, as flow_grpo needs; give the right number of GPUs with --gpus N"
        )
    batches, accumulated = get("sample.num_batches_per_epoch"), get("train.gradient_accumulation_steps")
    if batches % accumulated:
        return (
            f"sample.num_batches_per_epoch={batches} is no multiple of train.gradient_accumulation_steps={accumulated}"
            ", so that updates would mix steps"
        )
    return ""


ROWS = (
    same("pretrained.model", "model.path"),
    Row(
        key="model.dtype",
        value=_weights_dtype,
        sources=("mixed_precision", "use_lora"),
        note=lambda get: (
            "of float32 weights in autocast there, of the weights themselves here" if get("use_lora") else ""
        ),
    ),
    Row(
        key="model.max_sequence_length",
        value=lambda get: 512 if _family(get).name == "qwen_image" else 128,
    ),
    Row(
        key="model.lora.rank",
        value=lambda get: _RANKS[_family(get).name] if get("use_lora") else 0,
        sources=("use_lora",),
    ),
    Row(
        key="model.lora.alpha",
        value=lambda get: 2.0 * _RANKS[_family(get).name] if get("use_lora") else None,
    ),
    Row(
        key="model.lora.targets",
        value=lambda get: (
            [*(f"attn.{layer}" for layer in _ATTENTION), *_LAYERS[_family(get).name]]
            if get("use_lora")
            else None
        ),
    ),
    same("train.lora_path", "model.lora.warm_start"),
    Row(
        key="sampling.sde_type",
        value=_sde_type,
        sources=("sample.sde_type",),
    ),
    Row(
        key="sampling.cps_unscaled",
        value=lambda get: True if _sde_type(get) == "cps" else None,
        note="its cps log-probs lack 1 / (2 s^2)",
    ),
    same("sample.noise_level", "sampling.noise_level"),
    same("sample.num_steps", "sampling.num_inference_steps"),
    Row(
        key="sampling.sde_window_size",
        value=lambda get: _window(get)[0],
        sources=("sample.sde_window_size", "train.timestep_fraction"),
        note=lambda get: (
            f"{get(SCRIPT)} draws one window for each batch"
            if _draws_windows(get)
            else f"{get(SCRIPT)} draws no windows: it trains on the first timestep_fraction of the steps"
        ),
    ),
    Row(
        key="sampling.sde_window_range",
        value=lambda get: _window(get)[1],
        sources=("sample.sde_window_range",),
    ),
    Row(
        key="sampling.sde_noise_range",
        value=_noise_range,
        sources=("train.timestep_fraction",),
        note="noise in every step, trained on or not",
    ),
    Row(
        key="sampling.guidance_scale",
        value=lambda get: (
            get("sample.guidance_scale") if _family(get).guidance_key == "guidance_scale" else None
        ),
        sources=("sample.guidance_scale",),
    ),
    Row(
        key="sampling.true_cfg_scale",
        value=lambda get: (
            get("sample.guidance_scale") if _family(get).guidance_key == "true_cfg_scale" else None
        ),
        sources=("sample.guidance_scale",),
    ),
    Row(
        key="sampling.negative_prompt",
        value=lambda get: (
            " " if _family(get).name == "qwen_image" and get("sample.guidance_scale") > 1 else None
        ),
    ),
    same("resolution", "sampling.height"),
    same("resolution", "sampling.width"),
    Row(key="rollout.dtype", value=_dtype, sources=("mixed_precision",)),
    Row(
        key="rollout.prompts_per_step",
        value=lambda get: round(_prompts(get)),
        sources=("gpus", "sample.train_batch_size", "sample.num_batches_per_epoch"),
        note="GPUs * batch * batches / images per prompt",
    ),
    same("sample.num_image_per_prompt", "rollout.n"),
    same("sample.train_batch_size", "rollout.batch_size"),
    same("sample.same_latent", "rollout.same_initial_noise"),
    Row(
        key="actor.loss_mode",
        value=lambda get: "grpo_guard" if get("rationorm") else "flow_grpo",
        sources=("rationorm",),
    ),
    same("train.clip_range", "actor.clip_ratio"),
    same("train.adv_clip_max", "actor.adv_clip_max"),
    same("train.beta", "actor.kl_coef"),
    Row(
        key="actor.kl_weighting",
        value=lambda get: "flow_grpo" if get("train.beta") and _sde_type(get) == "sde" else None,
        note="its KL of sde steps is divided by the length of a step, that of cps steps is exact",
    ),
    Row(
        key="actor.optimizer",
        value=lambda get: "adamw_8bit" if get("train.use_8bit_adam") else "adamw",
        sources=("train.use_8bit_adam",),
        note="AdamW of bitsandbytes in both",
    ),
    same("train.learning_rate", "actor.lr"),
    Row(
        key="actor.betas",
        value=lambda get: [get("train.adam_beta1"), get("train.adam_beta2")],
        sources=("train.adam_beta1", "train.adam_beta2"),
    ),
    same("train.adam_weight_decay", "actor.weight_decay"),
    same("train.adam_epsilon", "actor.eps"),
    same("train.max_grad_norm", "actor.grad_clip"),
    same("train.num_inner_epochs", "actor.epochs"),
    Row(
        key="actor.mini_batches",
        value=_updates,
        sources=("train.gradient_accumulation_steps",),
        note="updates per step: batches / gradient_accumulation_steps; groups are never split here",
    ),
    same("train.batch_size", "actor.micro_batch_size"),
    Row(
        key="actor.autocast",
        value=lambda get: _weights_dtype(get) == "float32" and _dtype(get) == "bfloat16",
        sources=("mixed_precision",),
    ),
    same("activation_checkpointing", "actor.gradient_checkpointing"),
    Row(
        key="actor.ema",
        value=_ema,
        sources=("train.ema",),
        note=lambda get: (
            f"{_EMA_DECAY} there, {get('train.gradient_accumulation_steps')} times at every {_EMA_INTERVAL}th update; "
            "this is the decay of one update"
        ),
    ),
    Row(
        key="algorithm.advantage_std",
        value=lambda get: "global" if get("sample.global_std") else "group",
        sources=("sample.global_std",),
    ),
    Row(
        key="algorithm.rollout_correction.bypass_mode",
        value=lambda get: True,
        note="old log-probs are the rollout's",
    ),
    Row(
        key="reward.terms",
        value=lambda get: rewards.terms(_rewards(get)),
        sources=("reward_fn",),
        note=lambda get: rewards.note(_rewards(get)),
    ),
    Row(key="data.path", value=lambda get: _prompts_file(get, "train"), sources=("dataset", "prompt_fn")),
    Row(
        key="data.heldout_path",
        value=lambda get: _prompts_file(get, "test"),
        sources=("dataset", "prompt_fn"),
    ),
    Row(key="data.num_heldout", value=lambda get: _ALL_PROMPTS, note="all of them are evaluated"),
    Row(
        key="trainer.total_steps",
        value=lambda get: _WHOLE_RUN,
        note="it trains until it is stopped; a lower number ends the run",
    ),
    same("seed", "trainer.seed"),
    same("eval_freq", "trainer.eval_every", "epochs"),
    same("sample.eval_num_steps", "trainer.eval_num_inference_steps"),
    same("save_freq", "trainer.save_every", "epochs"),
    same("num_checkpoint_limit", "trainer.keep_checkpoints"),
    Row(key="trainer.trackers", value=lambda get: ["wandb"]),
)

NO_PLACE = {
    "sample.eval_guidance_scale": "evaluations use the guidance of sampling",
    "sample.*": "its script does not read it, or rollout.batch_size sets the size of batches",
    "train.*": "its script does not read it",
    "prompt_fn*": "prompts come from the file data.path",
    "save_dir": "give --out",
    "logdir": "give --out",
    "run_name": "give --out",
    "run_project": "belongs to its tracker",
    "num_epochs": "flow_grpo trains until it is stopped; see trainer.total_steps",
    "resume_from": "give --resume",
    "pretrained.revision": "flowcorr loads the newest revision",
    "allow_tf32": "set it in torch",
    "fsdp_optimizer_offload": "an adapter's optimizer is small; for the weights see actor.fsdp",
    "debug": "belongs to its script",
}

DIFFERENCES = (
    "flow_grpo's advantages use the population std, which is sqrt((n - 1) / n) of the std here",
    "flow_grpo leaves samples with advantage 0 out of the mean of the loss; here they count",
    "flow_grpo's GRPO-Guard averages std and step over the batch; here each sample has its own",
    "flow_grpo begins its average with decays below 0.9, (1 + n) / (10 + n) at update n; here it is one from the start",
)

TABLE = Table(
    name="flow_grpo",
    defaults=DEFAULTS,
    kinds=KINDS,
    required=tuple(_BASE),
    sections=("reward_fn",),
    rows=ROWS,
    no_place=NO_PLACE,
    differences=DIFFERENCES,
    refuse=_refuse,
)
