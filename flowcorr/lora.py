"""The adapter: added with peft, started from a file, merged for engines that take whole weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowcorr import sde
from flowcorr.config.schema import LoraConfig
from flowcorr.distributed import fsdp
from flowcorr.errors import ConfigError
from flowcorr.models import DTYPES, ModelFamily
from flowcorr.models.quantized import QuantizedLinear

ADAPTER = "default"
_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
_PREFIXES = ("transformer.", "base_model.model.")
_UNKNOWN_OPTIONS = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern")


def add_adapter(transformer: Any, family: ModelFamily, config: LoraConfig, *, seed: int) -> None:
    """Add a trainable adapter to `transformer`, drawn from `seed` or started from `config.warm_start`.

    Raises:
        ConfigError: a target names no linear layer, or a module of another kind; or the warm start does not fit.
    """
    import peft

    from flowcorr.models.lora_linear import LoraLinear

    targets = list(config.targets or family.lora_targets)
    for target in targets:
        _check_target(transformer, target)
    adapter = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
    )
    adapter._register_custom_module({nn.Linear: LoraLinear})
    # peft draws from the global generator: lend it one that depends on the run's seed alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sde.stable_seed(seed, "lora"))
        transformer.add_adapter(adapter, adapter_name=ADAPTER)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[config.dtype])
    if config.warm_start is not None:
        _load_warm_start(transformer, config.warm_start, config.alpha)


def _check_target(transformer: nn.Module, target: str) -> None:
    """Check that a target names linear layers only: peft adapts all that it names, and only those can be merged."""
    modules = dict(transformer.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    named = [name for name in modules if name == target or name.endswith("." + target)]
    found = [name for name in named if name in linear]
    if not found:
        raise ConfigError(
            f"model.lora.targets: {target!r} names no linear layer of the transformer; "
            f"choose from {_endings(linear)}"
        )
    for name in named:
        if name not in linear:
            raise ConfigError(
                f"model.lora.targets: {target!r} also names {name}, a {type(modules[name]).__name__}, and only linear "
                f"layers are adapted; choose from {_endings(found)}"
            )


def _endings(names: Sequence[str]) -> str:
    """Names of layers without the block's, for messages."""
    return ", ".join(sorted({name.split(".", 2)[-1] for name in names}))


def adapter_state(transformer: Any) -> dict[str, Tensor]:
    """The adapter's tensors under peft's portable names."""
    import peft

    return peft.get_peft_model_state_dict(transformer, adapter_name=ADAPTER)


def adapter_metadata(transformer: Any) -> dict[str, Any]:
    """Rank, alpha and targets, as diffusers stores them beside the tensors."""
    metadata = transformer.peft_config[ADAPTER].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in metadata.items()}


def merged_weights(transformer: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The transformer's weights under diffusers' names, one by one, with trained `tensors` put in or merged.

    Only one merged weight is in memory at a time; a sharded one is gathered, for which every rank has to take all. It
    has the precision of the more precise of base and adapter: small updates would be lost on the grid of a bfloat16
    base. A quantized one is dequantized in float32.

    Args:
        transformer: with or without an adapter; it is not changed.
        tensors: trained parameters by name, as `TrainedWeights.snapshot` gives them.
    """
    state = {name: tensors.get(name, value) for name, value in transformer.state_dict().items()}
    adapted = {path: module for path, module in transformer.named_modules() if hasattr(module, "lora_A")}
    quantized = {
        path: module for path, module in transformer.named_modules() if isinstance(module, QuantizedLinear)
    }
    for name, value in state.items():
        parent, _, child = name.rpartition(".")
        if ".lora_" in name or (parent in quantized and child == "scales"):
            continue
        value = fsdp.full_tensor(value)
        if parent in quantized and child == "weight":
            value = quantized[parent].dequantized(torch.float32)
        path = name.removesuffix(".base_layer.weight")
        if path in adapted:
            down, up = (state[f"{path}.lora_{side}.{ADAPTER}.weight"] for side in "AB")
            value = value + adapted[path].scaling[ADAPTER] * (up @ down)
        yield name.replace(".base_layer", ""), value


def _load_warm_start(transformer: Any, path: str, alpha: float) -> None:
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(os.path.expanduser(path))
    if file.is_dir():
        file = next((file / name for name in _FILES if (file / name).is_file()), file)
    if not file.is_file():
        raise ConfigError(
            f"model.lora.warm_start={path!r} holds no adapter; give a folder with {' or '.join(_FILES)}"
        )
    try:
        state = load_file(file)
    except SafetensorError as error:
        raise ConfigError(f"model.lora.warm_start={path!r} is not a safetensors file: {error}") from error
    stored = _stored_config(file)
    _check_plain(path, stored)
    for prefix in _PREFIXES:
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    expected = adapter_state(transformer)
    odd = sorted(
        name
        for name in expected.keys() | state.keys()
        if name not in expected or name not in state or expected[name].shape != state[name].shape
    )
    if odd:
        raise ConfigError(
            f"model.lora.warm_start={path!r} does not fit model.lora: {len(odd)} tensors differ in name or shape, "
            f"such as {odd[0]}; use the rank and targets that it was trained with"
        )
    _check_alpha(path, stored.get("lora_alpha"), alpha, transformer.peft_config[ADAPTER].r)
    peft.set_peft_model_state_dict(transformer, state, adapter_name=ADAPTER)


def _check_plain(path: str, stored: Mapping[str, Any]) -> None:
    for name in _UNKNOWN_OPTIONS:
        if stored.get(name):
            raise ConfigError(
                f"model.lora.warm_start={path!r} was trained with {name}={stored[name]!r}, which the adapters of "
                "model.lora do not have; give a plain LoRA, or merge this one into the model and name that in "
                "model.path"
            )


def _check_alpha(path: str, stored: float | None, alpha: float, rank: int) -> None:
    """Refuse another alpha than the stored one; without one it is the rank, which is what diffusers takes."""
    expected = rank if stored is None else stored
    if expected != alpha:
        held = (
            f"was trained with alpha {expected:g}"
            if stored is not None
            else f"stores no alpha, so it is the rank {rank}"
        )
        raise ConfigError(
            f"model.lora.warm_start={path!r} {held}, which model.lora.alpha={alpha:g} "
            f"would scale differently; set model.lora.alpha={expected:g}"
        )


def _stored_config(file: Path) -> dict[str, Any]:
    """The options that an adapter was trained with: in peft's file beside it, or in diffusers' file header."""
    from safetensors import safe_open

    beside = file.with_name("adapter_config.json")
    if beside.is_file():
        return json.loads(beside.read_text())
    with safe_open(file, "pt") as opened:
        header = opened.metadata() or {}
    metadata = json.loads(header.get("lora_adapter_metadata", "{}"))
    return {name.removeprefix("transformer."): value for name, value in metadata.items()}
