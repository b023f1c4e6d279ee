"""The configuration of a run: `load` a recipe, get a frozen `Config`."""

from flowcorr.config.engines import ENGINES, Engine, resolve_engine
from flowcorr.config.load import (
    defaults,
    dotted,
    errors_name,
    find_recipe,
    load,
    load_mapping,
    read_mapping,
    recipe_names,
    to_mapping,
    to_yaml,
)
from flowcorr.config.overrides import redact_override
from flowcorr.config.rollout import RolloutConfig
from flowcorr.config.run import TrainerConfig
from flowcorr.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    LoraConfig,
    ModelConfig,
    SamplingConfig,
)
from flowcorr.config.task import DataConfig, RewardConfig, RewardTerm

__all__ = [
    "ENGINES",
    "ActorConfig",
    "AlgorithmConfig",
    "Config",
    "DataConfig",
    "Engine",
    "LoraConfig",
    "ModelConfig",
    "RewardConfig",
    "RewardTerm",
    "RolloutConfig",
    "SamplingConfig",
    "TrainerConfig",
    "defaults",
    "dotted",
    "errors_name",
    "find_recipe",
    "load",
    "load_mapping",
    "read_mapping",
    "recipe_names",
    "redact_override",
    "resolve_engine",
    "to_mapping",
    "to_yaml",
]
