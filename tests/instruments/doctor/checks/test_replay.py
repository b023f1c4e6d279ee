"""The checks of captured samples that only read what the replay found."""

import pytest

from flowcorr.instruments.doctor.checks import replay


@pytest.mark.parametrize(
    ("check", "without", "level"),
    [
        (replay.check_before, None, "healthy"),
        (replay.check_between, None, "healthy"),
        (replay.check_after, None, "healthy"),
        (replay.check_after, "final_latents", None),
        (replay.check_embeddings, None, "healthy"),
        (replay.check_guidance, None, "healthy"),
        (replay.check_guidance, "guidance_scale", "note"),
        (replay.check_lora, None, "healthy"),
    ],
)
def test_what_the_replay_found(check, without, level, captured_of):
    found = check(captured_of(**({without: None} if without else {})))
    assert (None if found is None else found.level) == level
