import math

import pytest

from flowcorr.instruments.doctor.findings import failed, judged, of_check, passed, skipped, warned


@pytest.mark.parametrize(
    ("value", "fails_above", "level", "limit"),
    [
        (1.0, None, "healthy", 1.0),
        (1.1, None, "serious", 1.0),
        (1.1, 2.0, "warning", 1.0),
        (2.0, 2.0, "warning", 1.0),
        (2.1, 2.0, "serious", 2.0),
        (9.0, math.inf, "warning", 1.0),
        (math.nan, math.inf, "serious", math.inf),
        (math.nan, None, "serious", 1.0),
    ],
)
def test_the_level_follows_from_the_number(value, fails_above, level, limit):
    finding = judged(value, 1.0, "good", "bad", "remedy", fails_above=fails_above)
    assert (finding.level, finding.numbers["limit"]) == (level, limit)
    assert finding.sentence == ("good" if level == "healthy" else "bad")
    assert finding.remedy == ("" if level == "healthy" else "remedy")


def test_a_finding_has_its_check_as_its_cause_unless_it_names_another():
    plain, named = passed("m", value=None, limit=1.0), failed("m", "r", cause="noise_reused")
    assert (of_check("noise", plain).cause, of_check("noise", plain).numbers) == ("noise", {"limit": 1.0})
    assert plain.numbers == {"limit": 1.0}
    named = of_check("noise", named)
    assert (named.cause, named.numbers) == ("noise_reused", {"check": "noise", "confidence": "certain"})


@pytest.mark.parametrize("finding", [skipped("m"), warned("m", "r", value=1.0)])
def test_without_a_cause_of_its_own_there_is_none(finding):
    assert finding.cause == ""
