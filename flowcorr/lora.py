"""The adapter: added with peft, started from a file, merged for engines that take whole weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowcorr import sde
from flowcorr.config.schema import LoraConfig
from flowcorr.errors import ConfigError
from flowcorr.models import DTYPES, ModelFamily

ADAPTER = "default"
_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
_PREFIXES = ("transformer.", "base_model.model.")


def add_adapter(transformer: Any, family: ModelFamily, config: LoraConfig, *, seed: int) -> None:
    """Add a trainable adapter to `transformer`, drawn from `seed` or started from `config.warm_start`.

    Raises:
        ConfigError: a target names no layer, or the warm start does not fit.
    """
    import peft

    targets = list(config.targets or family.lora_targets)
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            examples = sorted({name.split(".", 2)[-1] for name in names})
            raise ConfigError(
                f"model.lora.targets: {target!r} names no linear layer of the transformer; "
                f"there are {', '.join(examples)}"
            )
    # peft draws from the global generator: lend it one that depends on the run's seed alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sde.stable_seed(seed, "lora"))
        transformer.add_adapter(
            peft.LoraConfig(
                r=config.rank,
                lora_alpha=config.alpha,
                target_modules=targets,
                init_lora_weights="gaussian" if config.init == "gaussian" else True,
            ),
            adapter_name=ADAPTER,
        )
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[config.dtype])
    if config.warm_start is not None:
        _load_warm_start(transformer, config.warm_start, config.alpha)


def adapter_state(transformer: Any) -> dict[str, Tensor]:
    """The adapter's tensors under peft's portable names."""
    import peft

    return peft.get_peft_model_state_dict(transformer, adapter_name=ADAPTER)


def adapter_metadata(transformer: Any) -> dict[str, Any]:
    """Rank, alpha and targets, as diffusers stores them beside the tensors."""
    metadata = transformer.peft_config[ADAPTER].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in metadata.items()}


def merged_state_dict(transformer: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transformer's state dict under diffusers' names, with trained `tensors` put in or merged.

    Args:
        transformer: with or without an adapter; it is not changed.
        tensors: trained parameters by name, as `DiffusionActor.snapshot` gives them.
    """
    state = {name: tensors.get(name, value) for name, value in transformer.state_dict().items()}
    for path, module in transformer.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        down, up = (state[f"{path}.lora_{side}.{ADAPTER}.weight"] for side in "AB")
        base = state[f"{path}.base_layer.weight"]
        state[f"{path}.base_layer.weight"] = (base + module.scaling[ADAPTER] * (up @ down)).to(base.dtype)
    return {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}


def _load_warm_start(transformer: Any, path: str, alpha: float) -> None:
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(path)
    if file.is_dir():
        file = next((file / name for name in _FILES if (file / name).is_file()), file)
    if not file.is_file():
        raise ConfigError(
            f"model.lora.warm_start={path!r} holds no adapter; give a folder with {' or '.join(_FILES)}"
        )
    try:
        state = load_file(file)
    except SafetensorError as error:
        raise ConfigError(f"model.lora.warm_start={path!r} is no safetensors file: {error}") from error
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
            f"as {odd[0]}; use the rank and targets that it was trained with"
        )
    stored = _stored_alpha(file)
    if stored is not None and stored != alpha:
        raise ConfigError(
            f"model.lora.warm_start={path!r} was trained with alpha {stored:g}, which model.lora.alpha={alpha:g} "
            f"would scale differently; set model.lora.alpha={stored:g}"
        )
    peft.set_peft_model_state_dict(transformer, state, adapter_name=ADAPTER)


def _stored_alpha(file: Path) -> float | None:
    """The alpha that an adapter was trained with: in diffusers' file header, or in peft's file beside it."""
    from safetensors import safe_open

    beside = file.with_name("adapter_config.json")
    if beside.is_file():
        return json.loads(beside.read_text()).get("lora_alpha")
    with safe_open(file, "pt") as opened:
        header = opened.metadata() or {}
    return json.loads(header.get("lora_adapter_metadata", "{}")).get("transformer.lora_alpha")
