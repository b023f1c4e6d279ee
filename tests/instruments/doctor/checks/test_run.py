"""The table of checks and the functions that answer its questions."""

import pytest
from instruments.doctor.faults import check as examined
from instruments.doctor.faults import finding_of, separate

from flowcorr.instruments.doctor.checks import CHECKS
from flowcorr.instruments.doctor.checks import run as checks_run
from flowcorr.instruments.doctor.checks.run import OF_CAPTURED, OF_TRIALS, check_captured
from flowcorr.questions.question import OF_ROLLOUTS, Question
from tests.planted.plants import returning


def test_every_question_has_a_function_of_its_own():
    assert [check.name for check in CHECKS if check.trials] == list(OF_TRIALS)
    assert [check.name for check in CHECKS if check.captured and check.name in OF_CAPTURED] == list(
        OF_CAPTURED
    )
    functions = [*OF_TRIALS.values(), *OF_CAPTURED.values()]
    assert len(set(functions)) == len(functions)


def test_a_check_asks_something_and_depends_on_earlier_ones():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for place, check in enumerate(CHECKS):
        assert check.trials or check.captured
        assert set(check.blockers) <= set(names[:place])


@pytest.mark.parametrize(
    ("check", "without", "level"),
    [
        ("after", None, "healthy"),
        ("after", "final_latents", None),
        ("guidance", "guidance_scale", "note"),
    ],
)
def test_what_the_replay_found(check, without, level, captured_of):
    found = check_captured(captured_of(**({without: None} if without else {}))).get(check)
    assert (None if found is None else found.level) == level


WORDS = {"what": "largest latent", "limit": 9.0, "remedy": "make them smaller"}
LARGEST = Question(
    name="largest", **WORDS, number=lambda compared: compared.rollout.window.latents.abs().flatten(1).amax(1)
)
SILENT = Question(name="silent", **WORDS, number=lambda compared: None)


def test_a_question_needs_no_check_of_its_own(small_run, monkeypatch):
    monkeypatch.setattr(checks_run, "OF_ROLLOUTS", (*OF_ROLLOUTS, LARGEST))
    run = small_run()
    assert finding_of(examined(run, separate(run)), "largest").level == "healthy"


def test_questions_of_ones_own_are_asked_and_a_fault_is_named(small_run):
    run = small_run(trainer={"checks": (f"{__name__}:LARGEST", f"{__name__}:SILENT")})
    engine = separate(run)
    report = examined(run, engine)
    assert (finding_of(report, "largest").level, finding_of(report, "silent").level) == ("healthy", "note")
    returning(latents=lambda rollout: 4 * rollout.window.latents)(engine)
    found = finding_of(examined(run, engine), "largest")
    assert (found.level, found.remedy) == ("serious", LARGEST.remedy)
    assert found.numbers["value"] > found.numbers["limit"] == 9.0
