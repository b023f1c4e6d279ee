from .prompts import ImageArray, Prompt, distinct
from .tensors import (
    HIGHEST_NOISE_LEVEL,
    LOWEST_NOISE_LEVEL,
    ActorBatch,
    Images,
    LossOutput,
    Rollout,
    Scores,
    Terms,
    Window,
    check_shape,
    check_tensor,
)

__all__ = [
    "HIGHEST_NOISE_LEVEL",
    "LOWEST_NOISE_LEVEL",
    "ActorBatch",
    "ImageArray",
    "Images",
    "LossOutput",
    "Prompt",
    "Rollout",
    "Scores",
    "Terms",
    "Window",
    "check_shape",
    "check_tensor",
    "distinct",
]
