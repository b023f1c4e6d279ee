"""When an explanation of a gap is accepted."""

from types import SimpleNamespace

import pytest

from flowcorr.instruments.doctor.exam import (
    EXPLAINED,
    FACTOR_ERRORS,
    Exam,
    largest_gap,
)
from flowcorr.instruments.doctor.trials import Fit
from flowcorr.rollout.precision import LARGEST_GAP


def test_no_precision_excuses_a_model_that_is_another():
    assert largest_gap(0.01) == pytest.approx(0.04)
    assert largest_gap(0.4) == LARGEST_GAP


@pytest.fixture
def exam(make_run):
    run = make_run(model={"dtype": "bfloat16"}, rollout={"dtype": "bfloat16"})
    return Exam(actor=run.actor, engine=run.engine, trials=None)


def evidence(exam, fit, gap=1e-2):
    return exam.evidence(SimpleNamespace(velocity_gap=lambda: gap), fit)


def test_a_fault_that_is_most_of_the_gap_is_accepted(exam):
    found = evidence(exam, Fit(factor=0.9, error=0.2, share=0.9, by_rounding=0.0))
    assert (found.value, found.threshold) == (0.9, EXPLAINED)


def test_a_small_fault_is_accepted_by_its_factor(exam):
    found = evidence(exam, Fit(factor=0.95, error=0.1, share=0.01, by_rounding=0.0))
    assert (found.value, found.threshold) == (pytest.approx(9.5), FACTOR_ERRORS)


@pytest.mark.parametrize(
    ("fit", "gap"),
    [
        (Fit(factor=0.5, error=0.01, share=0.01, by_rounding=0.0), 1e-2),  # not of the assumed size
        (Fit(factor=-0.15, error=0.01, share=0.99, by_rounding=0.0), 1e-2),  # of the other sign
        (Fit(factor=1.0, error=0.3, share=0.01, by_rounding=0.0), 1e-2),  # may be chance
        (Fit(factor=1.0, error=0.01, share=0.01, by_rounding=0.0), 0.1),  # leaves more than rounding
    ],
)
def test_other_gaps_are_not_explained(exam, fit, gap):
    assert evidence(exam, fit, gap) is None


def test_rounding_of_one_side_alone_is_no_evidence_by_its_factor(make_run):
    """It is the same at every step, so that an explanation without effect has a factor far from 0."""
    run = make_run(model={"dtype": "bfloat16"})
    exam = Exam(actor=run.actor, engine=run.engine, trials=None)
    assert evidence(exam, Fit(factor=0.78, error=0.01, share=0.5, by_rounding=0.0)) is None
    assert evidence(exam, Fit(factor=0.78, error=0.01, share=0.9, by_rounding=0.0)) is not None
