"""The table of checks and the functions that answer its questions."""

import pytest

from flowcorr.instruments.doctor.checks import CHECKS
from flowcorr.instruments.doctor.checks.run import OF_CAPTURED, OF_TRIALS


def test_every_question_has_a_function_of_its_own():
    assert [check.name for check in CHECKS if check.trials] == list(OF_TRIALS)
    assert [check.name for check in CHECKS if check.captured] == list(OF_CAPTURED)
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
    found = OF_CAPTURED[check](captured_of(**({without: None} if without else {})))
    assert (None if found is None else found.level) == level
