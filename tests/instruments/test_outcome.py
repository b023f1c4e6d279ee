"""A report holds plain values."""

import json

from flowcorr.health.finding import Finding
from flowcorr.instruments.outcome import Column, Fact, Report, Table


def test_the_worst_level_is_that_of_the_report():
    findings = [Finding(level=level, cause="x", sentence="y") for level in ("healthy", "warning", "note")]
    assert Report(title="", verdict="", findings=findings).level == "warning"
    assert Report(title="", verdict="").level == "healthy"


def test_data_are_finite_and_under_their_names():
    columns = [Column(name="step", words=True), Column(name="gap", heading="|delta|", show="{:.1e}".format)]
    table = Table(name="steps", title="By step", columns=columns, rows=[(0, 0.1), (1, float("nan"))])
    report = Report(title="a", verdict="b", facts=[Fact(name="nats", value=1.5)], tables=[table])
    data = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert data["facts"] == {"nats": 1.5}
    assert data["tables"] == {"steps": [{"step": 0, "gap": 0.1}, {"step": 1, "gap": None}]}
    assert (report.fact("nats"), report.fact("none"), report.table("none")) == (1.5, None, [])
    assert (table.header, table.num_words, table.cells((None, 0.1))) == (
        ["step", "|delta|"],
        1,
        ["-", "1.0e-01"],
    )
