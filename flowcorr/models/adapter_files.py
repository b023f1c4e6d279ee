"""Files of LoRA adapters: written at their full strength for every reader, and read in the layouts that people have."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowcorr.errors import ConfigError

DIFFUSERS_FILE, PEFT_FILE, PEFT_CONFIG = (
    "pytorch_lora_weights.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
)
_DIFFUSERS_PREFIX, _PEFT_PREFIX = "transformer.", "base_model.model."
_PREFIXES = (_PEFT_PREFIX, "model.diffusion_model.", "diffusion_model.", _DIFFUSERS_PREFIX, "module.")
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of torch, at any place
_ADAPTER_NAME = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_")  # of kohya: names of layers with _ for each dot
_TEXT_PREFIXES = ("text_encoder", "lora_te", "te1", "te2", "te3", "text_model")
_MATRIX = re.compile(r"(.+?)\.(?:lora_(A|B|down|up)|lora\.(down|up))(?:\.([^.]+))?\.weight")
_ALPHA = ".alpha"
_OTHER_KINDS = {  # parts of names of tensors, and what has them
    "lora_magnitude_vector": "DoRA",
    "dora_scale": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    ".diff": "whole differences of weights",
    ".bias": "biases",
}
_OTHER_OPTIONS = (
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
)
_OTHER_INITS = ("pissa", "olora", "corda", "loftq")  # they change the base weights as well
_REMEDY = "give a plain LoRA, or merge this one into the model and name that in model.path"
# What diffusers' converters raise on names that they were not made for.
_CONVERTER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraPair:
    """The adapter of one layer: `scale * up @ down` is added to its weight.

    Attributes:
        down: `[rank, in]`, which peft calls A.
        up: `[out, rank]`, which peft calls B.
        scale: alpha over rank.
    """

    down: Tensor
    up: Tensor
    scale: float


def rescaled(up: Tensor, factor: float) -> Tensor:
    """A matrix times a factor; in float32 unless its own dtype holds the product exactly."""
    is_power_of_2 = math.frexp(factor)[0] == 0.5
    return (up if is_power_of_2 else up.to(torch.promote_types(up.dtype, torch.float32))) * factor


def at_full_strength(
    state: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Multiply an adapter's scale into its tensors, and set its alpha to its rank.

    diffusers reads alpha in the file's header, peft in a file beside it, and tools such as ComfyUI in tensors called
    `alpha`, which diffusers refuses beside a header. Where alpha is the rank, all of them scale by 1.

    Args:
        state: tensors under peft's portable names.
        metadata: peft's options.
    """
    rank, alpha = metadata["r"], metadata["lora_alpha"]
    tensors = {
        name: rescaled(value, alpha / rank) if ".lora_B." in name else value for name, value in state.items()
    }
    return tensors, {**metadata, "lora_alpha": rank}


def without_wrappers(name: str) -> str:
    """A tensor's name without the parts that `torch.compile`, FSDP and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def plain_name(name: str) -> str:
    """An adapter's tensor as `peft.get_peft_model_state_dict` of the transformer alone names it.

    Names of wrappers are left out, of DistributedDataParallel, peft and pipelines before it as well, and the adapter's.
    """
    name = without_wrappers(name)
    while prefix := next(filter(name.startswith, _PREFIXES), None):
        name = name.removeprefix(prefix)
    return _ADAPTER_NAME.sub(r".\1.weight", name)


def write_for_diffusers(directory: str, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write an adapter for a pipeline's `load_lora_weights`, and for its transformer's `load_lora_adapter`."""
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
    from safetensors.torch import save_file

    options = {f"{_DIFFUSERS_PREFIX}{name}": value for name, value in metadata.items()}
    header = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(options, indent=2, sort_keys=True)}
    tensors = {f"{_DIFFUSERS_PREFIX}{name}": value.contiguous() for name, value in state.items()}
    save_file(tensors, Path(directory) / DIFFUSERS_FILE, metadata=header)


def write_for_peft(directory: str, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write an adapter for `peft.PeftModel.from_pretrained(transformer, directory)`."""
    from safetensors.torch import save_file

    (Path(directory) / PEFT_CONFIG).write_text(json.dumps(dict(metadata), indent=2, sort_keys=True))
    tensors = {f"{_PEFT_PREFIX}{name}": value.contiguous() for name, value in state.items()}
    save_file(tensors, Path(directory) / PEFT_FILE, metadata={"format": "pt"})


def read_adapter(path: str, layers: Collection[str], pipeline_class: str) -> dict[str, LoraPair]:
    """Read an adapter from a file: a pair of matrices for each layer, by diffusers' name of the layer.

    Names may be those of diffusers, peft, ai-toolkit, DiffSynth, Qwen-Image-Lightning, kohya, or any that diffusers
    converts for this pipeline.

    Args:
        path: a file, or a folder with `pytorch_lora_weights.safetensors` or `adapter_model.safetensors`.
        layers: names of the transformer's linear layers.
        pipeline_class: its pipeline's class in diffusers.

    Raises:
        ConfigError: there is no such file, or it is no plain LoRA of one rank, in numbers that are finite.
    """
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        file = next((file / name for name in (DIFFUSERS_FILE, PEFT_FILE) if (file / name).is_file()), file)
    if not file.is_file():
        raise ConfigError(
            f"model.lora.warm_start={path!r} holds no adapter; give a file, or a folder with {DIFFUSERS_FILE} or "
            f"{PEFT_FILE}"
        )
    try:
        state = _tensors(file)
        pairs = _pairs(state, _options(file))
        by_layer = _by_layer(pairs, layers)
        if by_layer is None:
            by_layer = _by_layer(_pairs(_converted(state, pairs, pipeline_class), {}), layers)
        if by_layer is None:
            raise ConfigError(
                f"its layers have names that neither this transformer nor diffusers' converter for {pipeline_class} "
                f"knows, such as {min(pairs)}; rename them as diffusers names them, such as {min(layers)}.lora_A.weight"
            )
    except ConfigError as error:
        raise ConfigError(f"model.lora.warm_start={path!r} cannot be used: {error}") from error
    return by_layer


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = {without_wrappers(name): _widened(value) for name, value in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file.name} is not a safetensors file: {error}") from error
    for name, value in state.items():
        if not (value.is_floating_point() or name.endswith(_ALPHA)) or value.is_complex():
            raise ConfigError(
                f"the tensor {name} in {file.name} is {value.dtype}; give an adapter in floating point"
            )
        if not value.to(torch.promote_types(value.dtype, torch.float32)).isfinite().all():
            raise ConfigError(
                f"the tensor {name} in {file.name} holds numbers that are not finite; its training diverged: give an "
                "earlier checkpoint"
            )
    return state


def _widened(value: Tensor) -> Tensor:
    """Floats of 8 bits, with which torch computes nothing, in float32."""
    return value.float() if value.is_floating_point() and value.itemsize == 1 else value


def _options(file: Path) -> dict[str, Any]:
    """Training options of an adapter, from peft's `adapter_config.json` or from the header that diffusers writes."""
    from safetensors import safe_open

    beside = file.with_name(PEFT_CONFIG)
    if beside.is_file():
        place, read = PEFT_CONFIG, lambda: beside.read_text(encoding="utf-8")
    else:
        place = f"the header of {file.name}"
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
        read = lambda: header.get("lora_adapter_metadata", "{}")  # noqa: E731
    try:
        options = json.loads(read())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{place} cannot be read as JSON ({error}); mend it, or give the adapter without it"
        ) from error
    if not isinstance(options, dict):
        raise ConfigError(
            f"{place} holds a {type(options).__name__}, and not the options of an adapter by name"
        )
    options = {name.removeprefix(_DIFFUSERS_PREFIX): value for name, value in options.items()}
    for name in ("r", "lora_alpha"):
        value = options.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value) and value > 0):
            raise ConfigError(f"{place} has {name}={value!r}, which must be a number above 0")
    _check_plain(options, place)
    return options


def _check_plain(options: Mapping[str, Any], place: str) -> None:
    odd = [name for name in options if name.startswith("use_") or name in _OTHER_OPTIONS]
    wrong = next((name for name in odd if options[name]), None)
    if options.get("bias") not in (None, "none"):
        wrong = "bias"
    if str(options.get("peft_type") or "LORA").rpartition(".")[2] != "LORA":
        wrong = "peft_type"
    if str(options.get("init_lora_weights")).startswith(_OTHER_INITS):
        wrong = "init_lora_weights"
    if wrong is not None:
        raise ConfigError(
            f"{place} says that it was trained with {wrong}={options[wrong]!r}, which the adapters of model.lora do "
            f"not have; {_REMEDY}"
        )


def _pairs(state: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, LoraPair]:
    """The pairs of a file by the names that it gives to layers."""
    sides: dict[str, dict[str, Tensor]] = {"down": {}, "up": {}}
    for name, value in state.items():
        if name.endswith(_ALPHA):
            continue
        match = _MATRIX.fullmatch(name)
        if match is None or value.dim() != 2:
            kind = next((kind for part, kind in _OTHER_KINDS.items() if part in name), None)
            raise ConfigError(
                f"it holds {kind or 'other tensors than those of a LoRA on linear layers'} ({name}); {_REMEDY}"
            )
        layer, side = match[1], match[2] or match[3]
        if layer.startswith(_TEXT_PREFIXES):
            raise ConfigError(
                f"it also adapts a text encoder ({name}), which is frozen here; leave these tensors out"
            )
        matrices = sides[{"A": "down", "B": "up"}.get(side, side)]
        if layer in matrices:
            raise ConfigError(f"it holds several adapters of {layer}; save one of them by itself")
        matrices[layer] = value
    downs, ups = sides["down"], sides["up"]
    if not downs or downs.keys() != ups.keys():
        lone = min(downs.keys() ^ ups.keys(), default=None)
        raise ConfigError(f"it holds one matrix of two for {lone}" if lone else "it holds no LoRA")
    alphas = {name.removesuffix(_ALPHA) for name in state if name.endswith(_ALPHA)}
    if stray := alphas - downs.keys():
        raise ConfigError(
            f"it holds {min(stray) + _ALPHA}, and no matrices of that name, so that a layer's scale is unknown; "
            "rename it as its matrices are named, or leave it out where the scale is 1"
        )
    ranks = {len(down) for down in downs.values()} | {up.shape[1] for up in ups.values()}
    if len(ranks) > 1 or 0 in ranks:
        raise ConfigError(
            f"its layers have ranks from {min(ranks)} to {max(ranks)}; give one of a single rank"
        )
    (rank,) = ranks
    if options.get("r") not in (None, rank):
        raise ConfigError(f"its options say r={options['r']}, and its tensors have rank {rank}")
    return {
        layer: LoraPair(
            down=down, up=ups[layer], scale=_alpha(state, layer, options.get("lora_alpha") or rank) / rank
        )
        for layer, down in downs.items()
    }


def _alpha(state: Mapping[str, Tensor], layer: str, otherwise: float) -> float:
    stored = state.get(layer + _ALPHA)
    if stored is None:
        return otherwise
    if stored.numel() != 1 or not stored.item() > 0:
        raise ConfigError(f"{layer + _ALPHA} is {stored.tolist()}, which must be a number above 0")
    return stored.item()


def _by_layer(pairs: Mapping[str, LoraPair], layers: Collection[str]) -> dict[str, LoraPair] | None:
    """The pairs by diffusers' names of the layers; None if one has another name.

    Raises:
        ConfigError: two pairs are of one layer, under different prefixes.
    """
    flat = {layer.replace(".", "_"): layer for layer in layers}
    by_layer = {}
    for name, pair in pairs.items():
        layer = name
        while layer not in layers and (prefix := next(filter(layer.startswith, _PREFIXES), None)):
            layer = layer.removeprefix(prefix)
        for prefix in _FLAT_PREFIXES:
            layer = flat.get(layer.removeprefix(prefix), layer) if layer.startswith(prefix) else layer
        if layer not in layers:
            return None
        if layer in by_layer:
            raise ConfigError(f"it holds several adapters of {layer}; save one of them by itself")
        by_layer[layer] = pair
    return by_layer


def _converted(
    state: Mapping[str, Tensor], pairs: Mapping[str, LoraPair], pipeline_class: str
) -> dict[str, Tensor]:
    """The tensors as diffusers converts them, at scale 1: some of its converters drop alpha."""
    import diffusers

    convert = getattr(getattr(diffusers, pipeline_class, None), "lora_state_dict", None)
    scaled = {}
    for name, value in state.items():
        match = _MATRIX.fullmatch(name)
        if match is None:  # an alpha
            continue
        pair, side = pairs[match[1]], match[2] or match[3]
        scaled[name] = rescaled(pair.up, pair.scale) if side in ("B", "up") else value
        if side in ("down", "up"):  # where alpha is missing, these converters take 1
            scaled[match[1] + _ALPHA] = torch.tensor(float(len(pair.down)))
    try:
        return dict(convert(scaled)) if convert else scaled
    except _CONVERTER_ERRORS:
        return scaled  # its names are then found to be unknown


def write_adapter(directory: str, lora_state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write an adapter for diffusers and peft, at its full strength."""
    state, options = at_full_strength(lora_state, metadata)
    Path(directory).mkdir(parents=True, exist_ok=True)
    write_for_diffusers(directory, state, options)
    write_for_peft(directory, state, options)
