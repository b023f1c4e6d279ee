"""The list of others' bugs: its form, and the draw of the third that is held back."""

from pathlib import Path

import pytest
from integrations.real_bugs import bugs, table, verdicts

from flowcorr.health.finding import Finding
from flowcorr.health.table import RULES
from flowcorr.instruments.doctor.checks import CAUSES, CHECKS
from flowcorr.instruments.fault_words import FAULTS

ROOT = Path(__file__).resolve().parents[2]
LIST = bugs.read_bugs()
AT_HAND = {
    *(
        "prompts",
        "initial_noise",
        "window",
        "log_probs",
        "trainer",
        "before_update",
        "old_rollout_kl",
        "sigmas",
    ),
    *("final_latents", "images", "adapter", "rewards", "group_ids", "advantages"),
}


def test_the_list_tells_of_each_bug_where_it_is_how_it_runs_and_its_name():
    assert len(LIST) >= 30
    for bug in LIST.values():
        assert bug.run in bugs.RUNS
        assert bug.read in ("diff", "description")
        assert bug.fix == "open" or bug.fix.startswith("pull ") or len(bug.fix) == 7
        assert bug.run not in ("loop", "reversed") or bug.read == "diff"
        assert set(bug.at_hand) <= AT_HAND, bug.key


def test_a_name_is_one_of_flowcorrs_or_said_to_be_new():
    names = {*CAUSES, *FAULTS, *(check.name for check in CHECKS), *(rule.name for rule in RULES)}
    assert {bug.key for bug in LIST.values() if not bug.new and bug.name not in names} == set()


def test_a_third_of_what_can_run_is_held():
    held = bugs.held(LIST)
    runnable = {key for key, bug in LIST.items() if bug.run != "none" and not bug.second}
    assert held < runnable
    assert len(held) == len(runnable) // 3
    assert held == bugs.held(dict(reversed(LIST.items())))


def said(*names, unnamed=()):
    return verdicts.Said(names=names, unnamed=tuple(unnamed))


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        ({"watch": said(), "audit": said(unnamed=["gap"]), "doctor": said("guidance_off")}, verdicts.RIGHT),
        ({"watch": said(), "audit": said("other_std"), "doctor": said("guidance_off")}, verdicts.RIGHT),
        ({"watch": said("guidance_off"), "audit": said(), "doctor": said("wrong_prompt")}, verdicts.WRONG),
        ({"watch": said(), "audit": said(), "doctor": said("guidance_off", "wrong_prompt")}, verdicts.WRONG),
        ({"watch": said(), "audit": said("other_std"), "doctor": said()}, verdicts.WRONG),
        ({"watch": said(), "audit": said(unnamed=["gap"]), "doctor": said()}, verdicts.UNNAMED),
        ({"watch": said(), "audit": said(), "doctor": said()}, verdicts.SILENT),
    ],
)
def test_the_last_instrument_that_names_a_fault_has_the_word(told, outcome):
    assert verdicts.outcome("guidance_off", told) == outcome


def test_notes_and_healthy_findings_say_nothing():
    findings = [
        Finding(level="note", cause="guidance_off", sentence="a"),
        Finding(level="healthy", cause="noise", sentence="a"),
        Finding(level="warning", cause="gap", sentence="a"),
        Finding(level="serious", cause="other_std", sentence="a"),
    ]
    assert verdicts.said_of(findings, "guidance_off") == said("other_std", unnamed=["gap"])
    assert verdicts.said_of(findings, "gap").names == ("gap", "other_std")


def test_the_interval_of_a_share_is_wilsons():
    """10 of 12, as published tables have it; a share of 0 or 1 has an interval too."""
    assert verdicts.wilson(10, 12) == pytest.approx((0.552, 0.953), abs=5e-4)
    assert verdicts.wilson(0, 4) == pytest.approx((0, 0.490), abs=5e-4)
    assert verdicts.wilson(4, 4) == pytest.approx((0.510, 1), abs=5e-4)


def test_the_page_has_the_table_of_the_recorded_runs():
    results, page = (
        table.read_results(),
        (ROOT / "tests/integrations/real_bugs/results.md").read_text(encoding="utf-8"),
    )
    for key, runs in results.items():
        assert set(runs) == {False, True}, key
        assert table.row(LIST[key], runs) in page


@pytest.mark.real_loops
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("key", [key for key, runs in table.read_results().items() if len(runs) == 2])
def test_a_bug_is_told_as_recorded(key, after, tmp_path):
    """Needs a clone of each project, see `real_bugs/__main__.py`; a run takes a minute."""
    from integrations.real_bugs.__main__ import judge

    assert judge(LIST[key], after, tmp_path / "run")["outcome"] == table.read_results()[key][after]["outcome"]
