"""Asks questions of a training step's batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from flowcorr.metrics import Metrics, Stat, maximum, mean
from flowcorr.questions.compared import Compared
from flowcorr.questions.question import Question


def ask(compared: Compared, questions: Iterable[Question]) -> Metrics:
    """The numbers of some questions that a batch can answer, under the names of their metrics."""
    numbers = {
        question.logged_as: question.number(compared) for question in questions if question.number is not None
    }
    return Metrics.from_stats({name: _stat(number) for name, number in numbers.items() if number is not None})


def _stat(number: Tensor) -> Stat:
    """The share of faulty samples, or the largest number, infinite if one is not finite; `-inf` if there is none."""
    if number.dtype == torch.bool:
        return mean(int(number.sum()), len(number))
    return maximum(float(number.nan_to_num(math.inf).max()) if number.numel() else -math.inf)
