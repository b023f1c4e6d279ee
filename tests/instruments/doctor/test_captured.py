"""Captured samples as the checks see them."""

from flowcorr.instruments.doctor.checks.run import check_captured


def test_a_replay_is_made_once_and_its_findings_are_those_of_the_checks(captured_of):
    samples = captured_of(guidance_scale=1.0)
    assert samples.replayed is samples.replayed
    assert samples.legs is samples.legs
    found = {check: finding.level for check, finding in check_captured(samples).items()}
    assert {check: found[check] for check in samples.replayed} == {
        check: finding.level for check, finding in samples.replayed.items()
    }
