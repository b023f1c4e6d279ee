"""The list of others' bugs: its form, and the draw of the third that is held back."""

from integrations.real_bugs import bugs

from flowcorr.instruments.doctor.checks import CAUSES, CHECKS
from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.metrics.table import RULES

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
    runnable = {key for key, bug in LIST.items() if bug.run != "none"}
    assert held < runnable
    assert len(held) == len(runnable) // 3
    assert held == bugs.held(dict(reversed(LIST.items())))
