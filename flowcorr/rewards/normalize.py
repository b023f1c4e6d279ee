"""The scores that advantages are taken of, from the terms of a weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flowcorr.advantages import group_advantages
from flowcorr.config.task import RewardTerm
from flowcorr.rewards.base import RewardOutput
from flowcorr.rewards.combine import label_of


def training_scores(output: RewardOutput, terms: Sequence[RewardTerm], group_ids: Tensor) -> Tensor:
    """Scores for advantages: `sum_k weight_k * reward_k`, with each term normalised by its `normalize`.

    `normalize: group` makes a term `(reward - mean of its group) / (std of its group)` before it is weighted and
    summed, so that its unit and spread do not change how much it counts. With `algorithm.advantage_std: global` this
    gives the advantages of GDPO, arXiv:2601.05242, section 3, and, except for the last division, DanceGRPO's for
    several rewards, arXiv:2505.07818. `global` divides by the std of all rewards of the step. Logs and evaluations use
    raw scores, since a normalised score has mean 0 by construction.

    Args:
        output: the scores of a `WeightedSum`, of samples that did not fail.
        terms: its terms.
        group_ids: `[B]`; samples of one prompt share one.

    Returns:
        `[B]` float64, on the device of `group_ids`; the output's own scores if no term is normalised.
    """
    device = group_ids.device
    if all(term.normalize == "none" for term in terms):
        return torch.as_tensor(output.scores, device=device)
    total = torch.zeros(len(output.scores), dtype=torch.float64, device=device)
    unscored = np.full(len(output.scores), np.nan)  # where all samples of this rank failed
    for term in terms:
        scores = torch.as_tensor(output.terms.get(label_of(term), unscored), device=device)
        rows = ~scores.isnan()  # samples that it scores
        scores = scores[rows]
        if term.normalize != "none":
            scores = group_advantages(scores, group_ids[rows], std=term.normalize)
        total[rows] += term.weight * scores
    return total
