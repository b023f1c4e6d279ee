"""Rewards: callables from images and prompts to scores."""

from flowcorr.rewards.aesthetic import Aesthetic
from flowcorr.rewards.base import (
    OnError,
    Reward,
    RewardOutput,
    as_reward_output,
    report_broken,
    reward_name,
    score_batch,
)
from flowcorr.rewards.combine import (
    REWARDS,
    WeightedSum,
    build_reward,
    check_terms,
    frame_rules,
    known_scores,
    training_scores,
)
from flowcorr.rewards.http import HttpReward
from flowcorr.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from flowcorr.rewards.ocr import OcrReward
from flowcorr.rewards.pickscore import PickScore
from flowcorr.rewards.prompt_checks import check_prompts, check_tags, check_targets
from flowcorr.rewards.reference_similarity import ReferenceSimilarity
from flowcorr.rewards.thread import ThreadReward, scored_ahead
from flowcorr.rewards.vlm_judge import VlmJudge

__all__ = [
    "REWARDS",
    "Aesthetic",
    "HttpReward",
    "JpegCompressibility",
    "JpegIncompressibility",
    "OcrReward",
    "OnError",
    "PickScore",
    "ReferenceSimilarity",
    "Reward",
    "RewardOutput",
    "ThreadReward",
    "VlmJudge",
    "WeightedSum",
    "as_reward_output",
    "build_reward",
    "check_prompts",
    "check_tags",
    "check_targets",
    "check_terms",
    "frame_rules",
    "known_scores",
    "report_broken",
    "reward_name",
    "score_batch",
    "scored_ahead",
    "training_scores",
]
