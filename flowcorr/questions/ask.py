"""Asks questions of a rollout."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from flowcorr.errors import ConfigError
from flowcorr.metrics import Stat, Stats, maximum, mean
from flowcorr.questions.compared import Compared
from flowcorr.questions.question import Question


def ask(compared: Compared, questions: Iterable[Question]) -> Stats:
    """Answer questions, by the names of their metrics; a question is left out if the rollout lacks its inputs.

    Raises:
        ConfigError: a number is no tensor with a row for each sample.
    """
    answers = {question.logged_as: _answer(question, compared) for question in questions}
    return {name: stat for name, stat in answers.items() if stat is not None}


def _answer(question: Question, compared: Compared) -> Stat | None:
    """The share of samples at fault, or the largest number: infinite if one is not finite, `-inf` if there is none."""
    assert question.number is not None, "only questions with a function are asked of a rollout"
    number, samples = question.number(compared), compared.rollout.num_samples
    if number is None:
        return None
    if not (isinstance(number, Tensor) and number.shape[:1] == (samples,)):
        what = (
            f"has the shape {list(number.shape)}"
            if isinstance(number, Tensor)
            else f"is a {type(number).__name__}"
        )
        raise ConfigError(
            f"trainer.checks: the number of the question {question.name!r} {what}; return a tensor [B, ...] with a row "
            f"for each of the {samples} samples, or None where they lack what it takes"
        )
    if number.dtype == torch.bool:
        return mean(int(number.reshape(samples, -1).any(1).sum()), samples)
    return maximum(float(number.nan_to_num(math.inf).max()) if number.numel() else -math.inf)
