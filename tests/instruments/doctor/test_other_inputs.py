"""Candidates of inputs are compared with each other, so that the one that explains the gap is named."""

import pytest
import torch
from instruments.doctor.faults import separate

from flowcorr.instruments.doctor.exam import Exam
from flowcorr.instruments.doctor.other_inputs import candidates, explanation, named
from flowcorr.instruments.doctor.trials import run_trials
from tests.planted.mistakes import rolled
from tests.planted.plants import conditioned, seeing


def exam_of(run, plant=lambda engine: None):
    engine = separate(run)
    plant(engine)
    engine.sync(run.actor.weights.snapshot())
    return Exam(actor=run.actor, engine=engine, trials=run_trials(run.actor, engine, run.conditioning))


def test_a_gap_that_no_other_inputs_explain_has_no_explanation(small_run):
    exam = exam_of(small_run(), seeing(lambda velocity, *rest: 1.1 * velocity(*rest)))
    assert exam.trials.base.velocity_gap() > exam.usual_gap
    assert explanation(exam) is None
    assert exam.answers == {"explanation": None}


def test_no_gap_is_not_explained(small_run):
    exam = exam_of(small_run())
    assert explanation(exam) is None
    assert exam.trials.withheld == {}


def test_the_inputs_that_explain_the_gap_are_told(small_run):
    found = explanation(exam_of(small_run(), conditioned(rolled, told=False)))
    assert found.candidate.numbers == {"fits": "others"}
    assert found.evidence.share == pytest.approx(1, abs=1e-3)


def test_negative_prompts_are_tried_where_the_gap_is_too_large(small_run):
    run = small_run(sampling={"guidance_scale": 4.0})
    tried = [
        {row.cause for row in candidates(exam, exam.trials.base.select(torch.tensor([0, 2])))}
        for exam in (exam_of(run), exam_of(run, seeing(lambda velocity, *rest: 1.1 * velocity(*rest))))
    ]
    assert tried == [{"embeddings"}, {"embeddings", "guidance"}]


def test_samples_are_named_in_words():
    assert named([3]) == "sample 3"
    assert named([1, 5]) == "samples 1, 5"
    assert named(range(9)) == "samples 0, 1, 2 and 6 more"
