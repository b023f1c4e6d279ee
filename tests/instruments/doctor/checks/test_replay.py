"""The checks of captured samples that only read what the replay found."""

import pytest

from flowcorr.instruments.doctor.checks import replay


@pytest.mark.parametrize(
    ("check", "without", "level"),
    [
        (replay.check_after, None, "healthy"),
        (replay.check_after, "final_latents", None),
        (replay.check_guidance, "guidance_scale", "note"),
    ],
)
def test_what_the_replay_found(check, without, level, captured_of):
    found = check(captured_of(**({without: None} if without else {})))
    assert (None if found is None else found.level) == level
