"""What a training step measures of its samples."""

import numpy as np
import pytest

from flowcorr.rewards import RewardOutput
from flowcorr.trainer.measurements import reward_metrics


def test_reward_metrics_are_of_the_scored_samples():
    scored = RewardOutput(
        scores=np.array([1.0, 3.0, np.nan, 2.0, 4.0, 4.0]),
        extra={"exact_match": np.array([0.0, 1.0, np.nan, 1.0, 1.0, 1.0]), "none": np.full(6, np.nan)},
    )
    values = reward_metrics(scored, np.isnan(scored.scores), np.array([0, 0, 1, 1, 2, 2])).compute()
    assert values == {
        "reward/failed_samples": 1,
        "reward/mean": pytest.approx(14 / 5),
        "reward/std": pytest.approx(np.std([1, 3, 2, 4, 4], ddof=1)),
        "reward/min": 1,
        "reward/max": 4,
        "reward/exact_match": pytest.approx(4 / 5),
        "reward/zero_std_group_fraction": pytest.approx(2 / 3),
    }
