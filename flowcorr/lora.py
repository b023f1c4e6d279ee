"""The adapter: added with peft, started from a file, merged for engines that take whole weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowcorr import sde
from flowcorr.config.schema import LoraConfig
from flowcorr.distributed import fsdp
from flowcorr.errors import ConfigError
from flowcorr.models import DTYPES, ModelFamily
from flowcorr.models.adapter_files import read_adapter, rescaled
from flowcorr.models.quantized import QuantizedLinear

ADAPTER = "default"


def add_adapter(transformer: Any, family: ModelFamily, config: LoraConfig, *, seed: int) -> None:
    """Add a trainable adapter to `transformer`, drawn from `seed` or started from `config.warm_start`.

    Raises:
        ConfigError: a target names no linear layer, or a module of another kind; or the warm start does not fit.
    """
    import peft

    from flowcorr.models.lora_linear import LoraLinear

    targets = list(config.targets or family.lora_targets)
    modules = dict(transformer.named_modules())
    for target in targets:
        _check_target(modules, target)
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
        _load_warm_start(transformer, family, config)


def _check_target(modules: Mapping[str, nn.Module], target: str) -> None:
    """Raise `ConfigError` unless every layer of a target is linear; only linear layers can be merged."""
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    named = [name for name in modules if name == target or name.endswith("." + target)]
    linear_named = [name for name in named if name in linear]
    if not linear_named:
        raise ConfigError(
            f"model.lora.targets: {target!r} names no linear layer of the transformer; "
            f"choose from {_endings(linear)}"
        )
    for name in named:
        if name not in linear:
            raise ConfigError(
                f"model.lora.targets: {target!r} also names {name}, a {type(modules[name]).__name__}, and only linear "
                f"layers are adapted; choose from {_endings(linear_named)}"
            )


def _endings(names: Sequence[str]) -> str:
    """Names of layers without the block's, for messages."""
    return ", ".join(sorted({name.split(".", 2)[-1] for name in names}))


def adapter_state(transformer: Any) -> dict[str, Tensor]:
    """The adapter's tensors under peft's portable names."""
    import peft

    return peft.get_peft_model_state_dict(transformer, adapter_name=ADAPTER)


def adapter_metadata(transformer: Any) -> dict[str, Any]:
    """Rank, alpha and targets, as diffusers stores them in an adapter's file."""
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


def _load_warm_start(transformer: Any, family: ModelFamily, config: LoraConfig) -> None:
    import peft

    path = config.warm_start
    assert path is not None
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    layers = {name.removesuffix(".base_layer") for name in linear if ".lora_" not in name}
    pairs = read_adapter(path, layers, family.pipeline_class)
    adapted = {name for name, module in transformer.named_modules() if hasattr(module, "lora_A")}
    rank = len(next(iter(pairs.values())).down)
    if rank != config.rank:
        raise ConfigError(
            f"model.lora.warm_start={path!r} does not fit model.lora.rank={config.rank}; set it to {rank}"
        )
    if pairs.keys() != adapted:
        raise ConfigError(
            f"model.lora.warm_start={path!r} does not fit model.lora.targets: {min(pairs.keys() ^ adapted)} is adapted "
            f"by one of them; it adapts {len(pairs)} layers, whose names end in {_endings(sorted(pairs))}"
        )
    scale = config.alpha / config.rank
    state = {f"{layer}.lora_A.weight": pair.down for layer, pair in pairs.items()}
    state |= {
        f"{layer}.lora_B.weight": rescaled(pair.up, pair.scale / scale) for layer, pair in pairs.items()
    }
    expected = adapter_state(transformer)
    odd = next((name for name, value in state.items() if value.shape != expected[name].shape), None)
    if odd is not None:
        raise ConfigError(
            f"model.lora.warm_start={path!r} is an adapter of another model: {odd} has the shape "
            f"{tuple(state[odd].shape)}, and this model needs {tuple(expected[odd].shape)}"
        )
    peft.set_peft_model_state_dict(transformer, state, adapter_name=ADAPTER)
