import json
import math

import pytest

from flowcorr.instruments.doctor import DoctorReport, Finding
from flowcorr.instruments.doctor.findings import judged


@pytest.mark.parametrize(
    ("value", "fails_above", "status", "threshold"),
    [
        (1.0, None, "PASS", 1.0),
        (1.1, None, "FAIL", 1.0),
        (1.1, 2.0, "WARN", 1.0),
        (2.0, 2.0, "WARN", 1.0),
        (2.1, 2.0, "FAIL", 2.0),
        (9.0, math.inf, "WARN", 1.0),
        (math.nan, math.inf, "FAIL", math.inf),
        (math.nan, None, "FAIL", 1.0),
    ],
)
def test_the_status_follows_from_the_number(value, fails_above, status, threshold):
    finding = judged(value, 1.0, "good", "bad", "remedy", fails_above=fails_above)
    assert (finding.status, finding.threshold) == (status, threshold)
    assert finding.message == ("good" if status == "PASS" else "bad")
    assert finding.remedy == ("" if status == "PASS" else "remedy")


@pytest.mark.parametrize("value", [1.1, math.nan])
def test_nothing_passes_above_its_threshold(value):
    with pytest.raises(AssertionError, match="above its threshold"):
        Finding(status="PASS", message="", value=value, threshold=1.0)


def test_the_report_is_plain_json():
    findings = [
        Finding(check="a", status="PASS", message="m"),
        Finding(check="b", status="WARN", message="m", value=float("nan")),
    ]
    report = DoctorReport(findings=findings, noise=[], num_elements=4, clip_ratio=0.1, images_per_second=2.0)
    plain = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert plain["exit_code"] == 1
    assert plain["findings"][1]["value"] is None
