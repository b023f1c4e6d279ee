from .aesthetic import Aesthetic
from .base import OnError, Reward, RewardOutput, as_reward_output, report_broken, reward_name, score_batch
from .combine import (
    REWARDS,
    WeightedSum,
    build_reward,
    check_terms,
    frame_rules,
    known_scores,
)
from .http import HttpReward
from .jpeg import JpegCompressibility, JpegIncompressibility
from .normalize import training_scores
from .ocr import OcrReward
from .pickscore import PickScore
from .prompt_checks import check_prompts, check_tags, check_targets
from .reference_similarity import ReferenceSimilarity
from .thread import ThreadReward, scored_ahead
from .vlm_judge import VlmJudge

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
