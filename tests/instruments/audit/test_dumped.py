"""The audit of dumped log-probs."""

import json
import math
from dataclasses import replace

import pytest
import torch
from instruments.dumped_runs import terms_of, write_run
from instruments.foreign_dumps import D, draw_steps

import flowcorr
from flowcorr.cli import main
from flowcorr.errors import ConfigError
from flowcorr.instruments.audit.advice import WORDS
from flowcorr.instruments.audit.dumped import audit_folder
from flowcorr.instruments.page import show
from flowcorr.instruments.report import report


def test_the_gap_is_found_from_log_probs_alone(tmp_path):
    report = audit_folder(draw_steps(tmp_path, steps=20))
    assert report.fact("joint_nats") == pytest.approx(2 * D * 0.02**2 / 2, rel=0.15)
    assert [step["step_index"] for step in report.table("steps")] == [1, 3]
    assert report.table("steps")[0]["sigma"] == pytest.approx(0.9)
    assert report.fact("mode") == "decoupled"
    assert report.fact("outside_clip") > 0.5
    assert report.fact("recompute_share") is None
    (note,) = notes_of(report)
    assert "old_rollout_kl" in note


def test_dumped_kls_are_taken(tmp_path):
    kl = torch.full((32, 2), 1e-6)
    report = audit_folder(draw_steps(tmp_path, old_rollout_kl=kl))
    assert report.fact("joint_nats") == pytest.approx(2 * D * 1e-6, rel=1e-6)
    assert not notes_of(report)


def test_log_probs_without_their_scale_tell_the_same_gap(tmp_path):
    terms = terms_of()
    unit = 2 * terms.stds.square()
    sides = ("rollout_log_probs", "old_log_probs", "current_log_probs")
    unscaled = replace(terms, **{name: unit * getattr(terms, name) for name in sides})
    cps = "sampling.sde_type=cps"
    densities = audit_folder(write_run(tmp_path / "densities", [terms], cps))
    others = audit_folder(write_run(tmp_path / "unscaled", [unscaled], cps, "sampling.cps_unscaled=true"))
    assert densities.fact("joint_nats") > 0
    assert others.fact("joint_nats") == pytest.approx(densities.fact("joint_nats"))


def test_a_shift_that_no_rounding_makes_is_told(tmp_path):
    """Ratios shifted the wrong way, as by other sigmas."""
    rollout = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    folder = draw_steps(tmp_path, rollout_log_probs=rollout, old_log_probs=rollout + 1e-3)
    notes = notes_of(audit_folder(folder))
    assert [note.split(":")[0] for note in notes[1:]] == ["step 1", "step 3"]


def test_samples_that_are_not_finite_are_left_out(tmp_path):
    rollout = torch.zeros(32, 2)
    rollout[5, 1] = math.nan
    report = audit_folder(draw_steps(tmp_path, steps=2, rollout_log_probs=rollout))
    assert report.fact("num_samples") == 62
    assert [report.findings[0].numbers[name] for name in ("samples", "of")] == [2, 64]


def test_a_step_of_weights_that_diverged_is_audited(tmp_path):
    folder = draw_steps(tmp_path)
    flowcorr.dump(
        folder,
        4,
        rollout_log_probs=torch.zeros(32, 2),
        old_log_probs=torch.full((32, 2), math.nan),
        advantages=torch.zeros(32),
        step_indices=[1, 3],
        num_elements=D,
    )
    first = audit_folder(folder).findings[0]
    assert first.cause == "non_finite"
    assert [first.numbers[name] for name in ("samples", "of", "since training step")] == [32, 128, 4]


def column(values):
    """`[32, 2]`, one value a step of the window."""
    return torch.tensor(values, dtype=torch.float64).expand(32, 2)


ROLLOUT = torch.randn(32, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 100
NAN = torch.where(torch.arange(64).view(32, 2) == 9, math.nan, ROLLOUT)
PLANTED = {
    "older weights": ({"policy_versions": [1] * 32, "version": 5}, "stale"),
    "one sigma": (
        {"rollout_log_probs": ROLLOUT, "old_log_probs": ROLLOUT - column([0.05, 1e-9])},
        "one_step",
    ),
    "not finite": ({"rollout_log_probs": NAN}, "non_finite"),
    "a shared number": (
        {"rollout_log_probs": ROLLOUT, "old_log_probs": ROLLOUT + column([0.27, 0.35])},
        "shared_shift",
    ),
    "sums": (
        {"rollout_log_probs": D * (1 + ROLLOUT), "old_log_probs": D * (1 + ROLLOUT) + 0.1},
        "summed",
    ),
    "other samples": (
        {"rollout_log_probs": ROLLOUT, "old_log_probs": ROLLOUT.roll(4, 0) - 1e-6},
        "other_order",
    ),
    "sums of the trainer": (
        {"rollout_log_probs": ROLLOUT - 0.7, "old_log_probs": D * (ROLLOUT - 0.7)},
        "summed",
    ),
}


def notes_of(report):
    """What a dump lacks, and how that was made up for."""
    return [finding.sentence for finding in report.findings if finding.cause == "files"]


def advice_in(report):
    """Whether there is advice on the gap."""
    return any(finding.cause in ("gap", "wider_clip") for finding in report.findings)


@pytest.mark.parametrize("planted", PLANTED)
def test_audit_report_and_watch_give_one_verdict(planted, tmp_path, capsys):
    changes, cause = PLANTED[planted]
    folder = draw_steps(tmp_path / "dump", **changes)
    audited = audit_folder(folder)
    assert audited.findings[0].cause == cause
    assert audited.verdict == audited.findings[0].sentence
    found = {finding.cause: finding for finding in report([folder]).findings}
    assert found[cause].sentence == audited.findings[0].sentence
    assert found[cause].remedy == audited.findings[0].remedy
    assert "clip_noise" not in found  # noise is no news beside a fault
    show(audited)
    first, *others = capsys.readouterr().out.splitlines()
    assert audited.verdict.startswith(first.rstrip())
    assert WORDS[False, "bypass"] not in " ".join(others)


def test_of_a_gap_of_a_few_samples_the_mean_is_its_kl(tmp_path):
    """The variance, which two of 96 samples make, would be 90 times as much."""
    old = ROLLOUT.clone()
    old[7] -= 2.0
    report = audit_folder(draw_steps(tmp_path, rollout_log_probs=ROLLOUT, old_log_probs=old))
    assert report.fact("joint_nats") == pytest.approx(2 * D * 2.0 / 32, rel=1e-3)
    assert [report.findings[0].numbers[name] for name in ("samples", "of")] == [3, 96]
    assert not advice_in(report)


@pytest.mark.parametrize("planted", ["one sigma", "sums", "a shared number", "other samples"])
def test_where_a_fault_hides_the_gap_there_is_no_advice(planted, tmp_path):
    report = audit_folder(draw_steps(tmp_path, **PLANTED[planted][0]))
    assert not advice_in(report)
    assert not any(finding.keys for finding in report.findings)


def test_a_step_that_nobody_trained_is_left_out(tmp_path):
    untrained = ROLLOUT + column([0.0, math.nan])
    report = audit_folder(draw_steps(tmp_path, old_log_probs=untrained, rollout_log_probs=ROLLOUT))
    assert (report.fact("num_steps"), report.fact("num_samples"), report.findings[0].cause) == (1, 96, "gap")


@pytest.mark.parametrize("without", [(), ("policy_versions",), ("version",)])
def test_bypass_is_advised_with_a_word_on_weights_of_unknown_age(without, tmp_path):
    folder = draw_steps(tmp_path, r=1e-6, clip_ratio=1.0, without=without)
    report = audit_folder(folder)
    assert report.fact("mode") == "bypass"
    assert any(finding.cause == "ages" for finding in report.findings) == bool(without)


def test_without_a_size_there_is_no_advice(tmp_path):
    folder = draw_steps(tmp_path / "dump", without=("num_elements", "sigmas", "clip_ratio"))
    assert main(["audit", str(folder), "--out", str(tmp_path / "out")]) == 0
    saved = json.loads((tmp_path / "out" / "audit.json").read_text(encoding="utf-8"))
    assert saved["findings"][0]["cause"] == "num_elements"
    assert "scales" not in saved["tables"]
    assert saved["tables"]["steps"][0]["sigma"] is None
    assert saved["facts"]["outside_clip"] is None


def test_the_command_reads_a_folder(tmp_path, capsys):
    folder = draw_steps(tmp_path / "dump")
    assert main(["audit", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert main(["audit", str(folder), "actor.lr=1"]) == 2
    assert "actor.lr=1" in capsys.readouterr().err


def test_a_dump_of_the_rollout_alone_is_refused(tmp_path):
    folder = draw_steps(tmp_path, without=("old_log_probs", "current_log_probs"))
    with pytest.raises(ConfigError, match=r"step_000001\.safetensors .*: old_log_probs .*current_log_probs"):
        audit_folder(folder)


def test_in_bypass_the_current_policy_is_audited(tmp_path):
    report = audit_folder(draw_steps(tmp_path, without=("old_log_probs",)))
    assert any("before_update" in note for note in notes_of(report))
    assert report.fact("joint_nats") == pytest.approx(2 * D * 0.02**2 / 2, rel=0.3)


def test_in_bypass_terms_scored_before_the_first_update_are_audited(tmp_path):
    learned = torch.tensor([0.0, 0.5])[torch.arange(32) % 2, None].double()
    draw = torch.Generator().manual_seed(0)
    rollout = torch.randn(32, 2, generator=draw, dtype=torch.float64)
    given = {"rollout_log_probs": rollout, "current_log_probs": rollout + learned}
    draw_steps(tmp_path, without=("old_log_probs",), before_update=learned.expand(32, 2) == 0, **given)
    report = audit_folder(tmp_path)
    assert (report.fact("num_samples"), report.findings[0].cause, report.fact("joint_nats")) == (48, "gap", 0)


@pytest.mark.parametrize(("samples", "told"), [(1, []), (7, []), (8, ["step 1", "step 3"])])
def test_few_terms_of_a_step_do_not_tell_whether_noise_explains_it(samples, told, tmp_path):
    rollout = ROLLOUT[:samples]
    given = {
        "rollout_log_probs": rollout,
        "old_log_probs": rollout + 1e-3,
        "advantages": torch.zeros(samples),
    }
    flowcorr.dump(tmp_path, 1, **given, step_indices=[1, 3], num_elements=D)
    notes = [note.split(":")[0] for note in notes_of(audit_folder(tmp_path))]
    assert [note for note in notes if note.startswith("step ")] == told


def test_a_run_that_scores_other_steps_in_each_training_step_is_refused(tmp_path):
    for step in range(2):
        old = ROLLOUT + column([math.nan, 0.0] if step else [0.0, math.nan])
        flowcorr.dump(
            tmp_path,
            step,
            rollout_log_probs=ROLLOUT,
            old_log_probs=old,
            advantages=torch.zeros(32),
            step_indices=[1, 3],
        )
    with pytest.raises(ConfigError, match=f"^{tmp_path} .*; score .* window"):
        audit_folder(tmp_path)


def test_a_step_scored_only_after_the_first_update_is_told_as_such(tmp_path):
    rollout = ROLLOUT.double()
    given = {"rollout_log_probs": rollout, "current_log_probs": rollout + 1e-3}
    draw_steps(tmp_path, without=("old_log_probs",), before_update=torch.tensor([[1, 0]] * 32), **given)
    report = audit_folder(tmp_path)
    (left_out,) = [note for note in notes_of(report) if "left out" in note and note.startswith("1 ")]
    assert "before the first update" in left_out
    assert report.fact("num_steps") == 1


@pytest.mark.parametrize("before", [[[1, 0], [0, 1]], [[0, 0], [0, 0]]])
def test_a_run_without_terms_before_an_update_is_refused(before, tmp_path):
    late = torch.tensor(before).repeat(16, 1)
    draw_steps(tmp_path, without=("old_log_probs",), before_update=late)
    with pytest.raises(ConfigError, match=rf"^{tmp_path} .*\(before_update\)"):
        audit_folder(tmp_path)


@pytest.mark.parametrize(("r", "sides"), [(0.02, ["engine", "trainer"]), (3.0, [])])
def test_a_rounding_that_hides_the_gap_is_told(r, sides, tmp_path):
    """Log-probs near 1 have steps of .008 in bfloat16."""
    draw = torch.Generator().manual_seed(5)
    rollout, noise = (torch.randn(96, 2, generator=draw, dtype=torch.float64) for _ in range(2))
    trainer = 1 + rollout / 100 - r**2 / 2 + r / D**0.5 * noise
    stored = {"rollout_log_probs": (1 + rollout / 100).bfloat16(), "old_log_probs": trainer.bfloat16()}
    flowcorr.dump(tmp_path, 1, **stored, advantages=torch.zeros(96), num_elements=D)
    lines = [line for line in notes_of(audit_folder(tmp_path)) if "stored in bfloat16" in line]
    assert [line.split("log-probs of the ")[1].split()[0] for line in lines] == sides
