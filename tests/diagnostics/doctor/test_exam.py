"""What gap is usual, and when an explanation of a gap is accepted."""

from types import SimpleNamespace

import pytest

from flowcorr.diagnostics.doctor.exam import (
    EXPLAINED,
    FACTOR_ERRORS,
    LARGEST_GAP,
    PRECISION_GAP,
    Exam,
    largest_gap,
    usual_gap,
)
from flowcorr.diagnostics.doctor.trials import Fit


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, PRECISION_GAP["float32"]),
        ({"rollout": {"dtype": "bfloat16"}}, PRECISION_GAP["bfloat16"]),
        ({"actor": {"autocast": True}}, PRECISION_GAP["bfloat16"]),
        ({"rollout": {"emulate": "int4"}}, PRECISION_GAP["int4"]),
        ({"rollout": {"engine": {"quantization": "fp8"}}}, PRECISION_GAP["fp8"]),
        ({"sampling": {"guidance_scale": 4.0}}, 4 * PRECISION_GAP["float32"]),
        ({"sampling": {"true_cfg_scale": 2.5}}, 2.5 * PRECISION_GAP["float32"]),
    ],
)
def test_the_usual_gap_is_that_of_the_coarsest_part(make_config, sections, expected):
    assert usual_gap(make_config(**sections), distilled=False) == pytest.approx(expected)


def test_distilled_guidance_amplifies_nothing(make_config):
    config = make_config(sampling={"guidance_scale": 4.0})
    assert usual_gap(config, distilled=True) == PRECISION_GAP["float32"]


def test_no_precision_excuses_a_model_that_is_another():
    assert largest_gap(0.01) == pytest.approx(0.04)
    assert largest_gap(0.4) == LARGEST_GAP


@pytest.fixture
def exam(make_run):
    run = make_run()
    return Exam(actor=run.actor, engine=run.engine, trials=None)


def evidence(exam, fit, gap=1e-4):
    return exam.evidence(SimpleNamespace(velocity_gap=lambda: gap), fit)


def test_a_fault_that_is_most_of_the_gap_is_accepted(exam):
    found = evidence(exam, Fit(factor=0.5, error=0.2, share=0.9))
    assert (found.value, found.threshold) == (0.9, EXPLAINED)
    assert "90 % of the gap" in found.text


def test_a_small_fault_is_accepted_by_its_factor(exam):
    found = evidence(exam, Fit(factor=0.95, error=0.1, share=0.01))
    assert (found.value, found.threshold) == (pytest.approx(9.5), FACTOR_ERRORS)
    assert "0.95 +- 0.10 times" in found.text


@pytest.mark.parametrize(
    ("fit", "gap"),
    [
        (Fit(factor=0.5, error=0.01, share=0.01), 1e-4),  # not of the assumed size
        (Fit(factor=1.0, error=0.3, share=0.01), 1e-4),  # may be chance
        (Fit(factor=1.0, error=0.01, share=0.01), 0.1),  # leaves more than rounding
    ],
)
def test_other_gaps_are_not_explained(exam, fit, gap):
    assert evidence(exam, fit, gap) is None
