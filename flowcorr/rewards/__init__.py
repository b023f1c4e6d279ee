"""Rewards: callables from images and prompts to scores."""

from flowcorr.rewards.base import OnError, Reward, RewardOutput, as_reward_output, reward_name, score_batch
from flowcorr.rewards.combine import REWARDS, WeightedSum, build_reward
from flowcorr.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from flowcorr.rewards.ocr import OcrReward

__all__ = [
    "REWARDS",
    "JpegCompressibility",
    "JpegIncompressibility",
    "OcrReward",
    "OnError",
    "Reward",
    "RewardOutput",
    "WeightedSum",
    "as_reward_output",
    "build_reward",
    "reward_name",
    "score_batch",
]
