"""Captured samples as the checks see them."""

from pkgutil import resolve_name

from flowcorr.instruments.doctor import checks
from flowcorr.instruments.doctor.checks import CHECKS, run_checks


def test_a_replay_is_made_once_and_its_findings_are_those_of_the_checks(captured_of):
    samples = captured_of(guidance_scale=1.0)
    assert samples.replayed is samples.replayed
    assert samples.legs is samples.legs
    found = {check: finding.level for check, finding in run_checks(samples).items()}
    assert {check: found[check] for check in samples.replayed} == {
        check: finding.level for check, finding in samples.replayed.items()
    }


def test_every_check_is_one_of_some_samples():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.trials or check.captured for check in CHECKS)
    names = [check.name for check in CHECKS]
    for place, check in enumerate(CHECKS):
        assert set(check.blockers) <= set(names[:place])


def test_every_question_has_a_function_of_its_own():
    questions = [question for check in CHECKS for question in (check.trials, check.captured) if question]
    functions = {resolve_name(f"{checks.__name__}.{question.by}") for question in questions}
    assert len(functions) == len(questions)
