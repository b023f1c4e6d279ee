"""Folders of steps that another trainer dumped, with little and with much in them."""

import math

import numpy as np
import pytest
import torch
from instruments.foreign_dumps import D, draw_steps

import flowcorr
from flowcorr import dumps
from flowcorr.errors import ConfigError
from flowcorr.instruments.audit import audit_folder
from flowcorr.instruments.dumped_loss import UNBOUNDED
from flowcorr.instruments.report import report
from flowcorr.instruments.report.charts import chart_sections
from flowcorr.instruments.report.runs import group_by_seed, read_run
from flowcorr.instruments.report.terms import read_spread
from flowcorr.instruments.steps import as_terms, diagnosed, read_dumped, records
from flowcorr.instruments.watch import Watch
from tests.odd_files import BATCH, write_step


def test_what_a_dump_tells_is_the_configuration(tmp_path):
    run = read_dumped(draw_steps(tmp_path))
    assert (run.of_flowcorr, run.notes) == (False, ())
    assert (run.setting.actor.clip_ratio, run.setting.num_steps, run.setting.window_size) == (1e-4, 4, 2)
    assert not run.setting.correction.bypass_mode


def test_records_are_those_of_training(tmp_path):
    logged = records(read_dumped(draw_steps(tmp_path)))
    assert [record["step"] for record in logged] == [1, 2, 3]
    first = logged[0]
    assert first["rollout_corr/kl"] == pytest.approx(0.02**2 / 2, rel=0.3)
    assert first["rollout_corr/step_3/logprob_abs_diff"] > 0
    assert "rollout_corr/step_0/kl" not in first
    assert first["rollout_corr/clip_noise_fraction"] > 0.5
    assert first["actor/pg_clipfrac"] == 0
    assert first["reward/mean"] == 0.5
    assert first["reward/zero_std_group_fraction"] == 0
    assert first["rollout/num_elements"] == D


def test_what_is_missing_is_left_out(tmp_path):
    optional = (
        "current_log_probs",
        "rewards",
        "group_ids",
        "step_indices",
        "sigmas",
        "num_elements",
        "clip_ratio",
        "policy_versions",
        "version",
    )
    run = read_dumped(draw_steps(tmp_path, without=optional))
    assert [note.split(",")[0].removeprefix("not dumped: ") for note in run.notes] == [
        *(
            "current_log_probs",
            "clip_ratio",
            "num_elements",
            "step_indices",
            "sigmas",
            "rewards",
            "group_ids",
        ),
        "policy_versions",
    ]
    assert run.setting.actor.clip_ratio == UNBOUNDED
    (first, *_) = records(run)
    assert {name.split("/")[0] for name in first} == {"step", "rollout_corr"}
    assert "rollout_corr/clip_noise_fraction" not in first


def test_without_a_clip_range_no_term_is_called_clipped_or_not(tmp_path):
    (first, *_) = records(read_dumped(draw_steps(tmp_path, without=("clip_ratio",))))
    assert {name for name in first if name.startswith("actor/")} == {
        "actor/ppo_kl",
        "actor/ratio_mean",
        "actor/ratio_std",
        "actor/nonfinite_fraction",
    }


def test_a_metric_that_overflows_is_not_logged(tmp_path):
    (first, *_) = records(read_dumped(draw_steps(tmp_path, rewards=np.full(32, 1e308))))
    assert first["reward/mean"] is None


def test_files_with_and_without_step_indices_are_told_apart(tmp_path):
    draw_steps(tmp_path)
    assert not any("some files lack step_indices" in note for note in read_dumped(tmp_path).notes)
    with pytest.warns(UserWarning, match=r"step_00000[12]\.safetensors .*replaced"):
        draw_steps(tmp_path, steps=2, without=("step_indices", "sigmas"))
    run = read_dumped(tmp_path)
    assert sum("some files lack step_indices" in note for note in run.notes) == 1
    assert ["rollout_corr/step_0/kl" in record for record in records(run)] == [True, True, False]


def test_in_bypass_the_drift_is_that_of_the_current_policy(tmp_path):
    run = read_dumped(draw_steps(tmp_path, without=("old_log_probs",), clip_ratio=[1e-4] * 4))
    assert run.setting.correction.bypass_mode
    (first, *_) = records(run)
    assert first["rollout_corr/kl"] == pytest.approx(0.02**2 / 2, rel=0.3)
    assert first["actor/pg_clipfrac"] > 0.5


def test_a_loss_that_reads_step_means_is_judged_by_its_ratio(tmp_path):
    run = read_dumped(draw_steps(tmp_path, loss_mode="grpo_guard"))
    assert run.setting.actor.loss_mode == "flow_grpo"
    assert "grpo_guard" in run.notes[0]
    assert run.setting.actor.clip_ratio == UNBOUNDED
    assert "rollout_corr/clip_noise_fraction" not in records(run)[0]


def test_an_empty_folder_says_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match=rf"^{tmp_path} .*config\.yaml .*flowcorr\.dump"):
        read_dumped(tmp_path)


def test_files_of_two_losses_are_judged_each_by_its_own(tmp_path):
    write_step(tmp_path, 1)
    write_step(tmp_path, 2, metadata={"clip_ratio": "0.1"})
    run = read_dumped(tmp_path)
    assert [setting.actor.clip_ratio for setting in run.settings.values()] == [1e-3, 0.1]
    assert run.setting.actor.clip_ratio == 0.1
    assert "step_000002" in run.notes[-1]


def test_noise_levels_stay_within_the_clip_range(tmp_path):
    """Two steps a sample, and three levels over all samples."""
    sigmas = torch.tensor([[0.9, 0.8], [0.8, 0.7]] * (BATCH // 2))
    write_step(
        tmp_path, metadata={"clip_ratio": "[0.1, 0.1]"}, tensors={"step_indices": None, "sigmas": sigmas}
    )
    with pytest.raises(ConfigError, match=r"step_000001\.safetensors: clip_ratio has 2 .* 3 steps;"):
        read_dumped(tmp_path)


def test_a_clip_range_of_a_schedule_tells_its_length(tmp_path):
    write_step(tmp_path, metadata={"clip_ratio": str([1e-3] * 28)})
    setting = read_dumped(tmp_path).setting
    assert (setting.num_steps, len(setting.actor.clip_ratio)) == (28, 28)


def test_a_loss_of_ones_own_is_named_and_not_imported(tmp_path, monkeypatch):
    (tmp_path / "a_helper.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    write_step(tmp_path, metadata={"loss_mode": "a_helper:loss"})
    run = read_dumped(tmp_path)
    assert (run.loss_mode, run.setting.actor.loss_mode) == ("a_helper:loss", "flow_grpo")
    assert run.notes[-1].endswith("--allow-import a_helper:loss")
    with pytest.raises(ConfigError, match="RuntimeError: imported"):
        read_dumped(tmp_path, allow_imports=["a_helper:loss"])


@pytest.mark.parametrize("name", ["grpo", "a:b:c", "/bin/sh:x", "flow_grpo "])
def test_an_unknown_loss_is_named_with_its_file(name, tmp_path):
    path = write_step(tmp_path, metadata={"loss_mode": name})
    with pytest.raises(ConfigError, match=f"{path}: loss_mode='{name}' .* from flow_grpo,"):
        read_dumped(tmp_path)


def test_many_groups_take_no_time(tmp_path):
    rows = torch.arange(50_000)
    window = torch.zeros(50_000, 1)
    rewards = (rows % 3 == 0).float()
    flowcorr.dump(
        tmp_path, 1, rollout_log_probs=window, old_log_probs=window, advantages=rewards, rewards=rewards,
        group_ids=rows // 2 + 2**62,
    )  # fmt: skip
    (record,) = records(read_dumped(tmp_path))
    assert record["reward/zero_std_group_fraction"] == pytest.approx(1 / 3, abs=1e-3)


def test_failed_rewards_are_left_out_of_their_groups(tmp_path):
    nan = math.nan
    rewards = [1.0, nan, 1.0, 1.0, 0.0, 1.0, nan, nan]  # one score, equal ones, a spread, none
    draw_steps(tmp_path, steps=1, rewards=rewards * 4, group_ids=[sample // 2 % 4 for sample in range(32)])
    (record,) = records(read_dumped(tmp_path))
    assert record["reward/zero_std_group_fraction"] == 0.75


LEARNED = torch.tensor([0.0, 0.1])[torch.arange(32) % 2, None]
"""By sample; every second one was scored after the first update."""
FRESH = (LEARNED == 0).expand(32, 2)


def test_what_was_learned_is_no_gap(tmp_path):
    """A bypass run: half of the terms have learned, and are in the update's curves alone."""
    draw = torch.Generator().manual_seed(0)
    rollout = torch.randn(32, 2, generator=draw, dtype=torch.float64)
    current = rollout + 1e-6 * torch.randn(32, 2, generator=draw, dtype=torch.float64) + LEARNED
    draw_steps(
        tmp_path,
        without=("old_log_probs",),
        rollout_log_probs=rollout,
        current_log_probs=current,
        before_update=FRESH,
    )
    run = read_dumped(tmp_path)
    assert run.notes == ()
    first = records(run)[0]
    assert first["rollout_corr/logprob_abs_diff_max"] < 1e-5
    assert first["rollout_corr/nonfinite_fraction"] == 0
    assert first["actor/ratio_mean"] == pytest.approx(1 + math.expm1(0.1) / 2, rel=1e-3)
    assert diagnosed(run) == []
    terms = as_terms(run.steps[1].terms)
    assert torch.equal(terms.keep, FRESH)


def test_a_file_without_the_mark_is_judged_whole(tmp_path):
    draw_steps(tmp_path, without=("old_log_probs",))
    run = read_dumped(tmp_path)
    assert [note.split(",")[0].split(": ")[1] for note in run.notes] == ["before_update"]
    assert as_terms(run.steps[1].terms).keep is None


BROKEN = {
    "in both": (math.nan, math.nan),
    "in the engine": (math.inf, 0.0),
    "infinite in the trainer": (0.0, -math.inf),
}


@pytest.mark.parametrize(("engine", "trainer"), BROKEN.values(), ids=BROKEN)
def test_a_step_that_is_broken_in_every_sample_is_a_fault(engine, trainer, tmp_path):
    own = torch.linspace(0.05, 0.15, 32)  # of each sample
    sides = {"rollout_log_probs": engine, "old_log_probs": trainer}
    draw_steps(tmp_path, **{name: torch.stack([own, own + added], 1) for name, added in sides.items()})
    run = read_dumped(tmp_path)
    assert records(run)[0]["rollout_corr/nonfinite_fraction"] == 0.5
    assert [found.cause for found in diagnosed(run)] == ["non_finite"]


def test_a_step_that_nobody_trained_is_left_out_of_the_gap(tmp_path):
    draw_steps(tmp_path, old_log_probs=torch.tensor([[0.1, math.nan]]).expand(32, 2))
    assert as_terms(dumps.load(dumps.files(tmp_path)[1])).keep.all(0).tolist() == [True, False]


@pytest.mark.parametrize("old", ["rollout", "recomputed"])
def test_a_step_that_nobody_trained_is_no_part_of_the_update(old, tmp_path):
    """As flow_grpo's `timestep_fraction` leaves it: the weights did not diverge there."""
    rollout = torch.zeros(32, 2)
    untrained = torch.tensor([[0.0, math.nan]]).expand(32, 2)
    draw_steps(
        tmp_path,
        rollout_log_probs=rollout,
        old_log_probs=None if old == "rollout" else untrained,
        current_log_probs=untrained + math.log(1.5),
        clip_ratio=0.1,
    )
    first = records(read_dumped(tmp_path))[0]
    assert first["actor/nonfinite_fraction"] == 0
    assert first["actor/ratio_mean"] == pytest.approx(1.5)


# Steps that differ --------------------------------------------------------------------------------------------------

SIZE = 4096
FIELDS = {"step_indices": [1, 3], "sigmas": [0.9, 0.7]}


def drawn_step(seed, r, *, bypass, **fields):
    """The fields of a step of which both means are `r` stds apart, and its log-ratios."""
    draw = torch.Generator().manual_seed(seed)
    rollout, noise = (torch.randn(32, 2, generator=draw, dtype=torch.float64) for _ in range(2))
    delta = -(r**2) / 2 + r / math.sqrt(SIZE) * noise
    side = {"current_log_probs": rollout + delta}
    if not bypass:
        side |= {"old_log_probs": rollout + delta}
    elif "before_update" not in fields:
        side |= {"before_update": torch.ones(32, 2)}
    advantages = torch.randn(32, generator=draw, dtype=torch.float64)
    return {"rollout_log_probs": rollout, "advantages": advantages, **side, **FIELDS, **fields}, delta


MIXED = {
    1: {"bypass": False, "r": 0.01, "clip_ratio": 1e-4, "num_elements": SIZE},
    2: {"bypass": True, "r": 0.1, "clip_ratio": [2e-3] * 4},
    3: {"bypass": False, "r": 0.02},
    4: {"bypass": True, "r": 0.03, "loss_mode": "importance_cap"},
    5: {"bypass": True, "r": 0.03, "clip_ratio": 1e-3, "before_update": [[1, 0]] * 32},
    6: {"bypass": False, "r": 0.05, "clip_ratio": 1e-2, "num_elements": SIZE, "group_ids": [0, 1] * 16},
}


@pytest.fixture
def mixed(tmp_path):
    """A folder that a trainer goes on in after it changed mode, clip range, loss and fields; its log-ratios by step."""
    deltas = {}
    for step, change in MIXED.items():
        fields, deltas[step] = drawn_step(step, **change)
        flowcorr.dump(tmp_path, step, **fields)
    return tmp_path, deltas


def outside_of(delta, clip):
    return float((delta.expm1().abs() > clip).double().mean())


def test_each_step_is_judged_by_its_own_mode_and_clip_range(mixed):
    folder, deltas = mixed
    deltas[5] = deltas[5][:, :1]  # the other column was scored after the update
    logged, watch = {one["step"]: one for one in read_run(folder).records}, Watch()
    for step, delta in deltas.items():
        record = logged[step]
        assert record["rollout_corr/kl"] == pytest.approx(float(-delta.mean()))
        assert record["rollout_corr/logprob_abs_diff_mean"] == pytest.approx(float(delta.abs().mean()))
        assert record["rollout/num_elements"] == SIZE
        change = {name: value for name, value in MIXED[step].items() if name not in ("bypass", "r")}
        fields, _ = drawn_step(step, MIXED[step]["r"], bypass=MIXED[step]["bypass"], **change)
        metrics, _ = watch(step, **fields)
        assert metrics == {name: value for name, value in record.items() if name.startswith("rollout_corr/")}
    clips = {1: 1e-4, 2: 2e-3, 5: 1e-3, 6: 1e-2}
    for step, record in logged.items():
        expected = outside_of(deltas[step], clips[step]) if step in clips else None
        assert record.get("rollout_corr/clip_noise_fraction") == expected
        ratio = 0.0 if step in (1, 6) else expected
        assert record.get("actor/pg_clipfrac") == (None if step not in clips else pytest.approx(ratio, abs=1))


def test_audit_pools_steps_that_differ(mixed):
    folder, deltas = mixed
    audited = audit_folder(folder)
    deltas.pop(5)  # no sample of it was scored before the update at both steps
    nats = sum(change["r"] ** 2 for step, change in MIXED.items() if step != 5) / 5 * SIZE
    assert audited.fact("joint_nats") == pytest.approx(nats, rel=0.1)
    clips = {1: 1e-4, 2: 2e-3, 6: 1e-2}
    outside = sum(outside_of(deltas[step], clip) for step, clip in clips.items()) / 3
    assert audited.fact("outside_clip") == pytest.approx(outside)
    assert audited.fact("clip_limit") == 1e-2
    (presets,) = [table for table in audited.tables if table.name == "presets"]
    assert {row["preset"] for row in presets.records()} >= {"bypass_ppo_clip", "decoupled_geo_rs"}
    # That gaps of several sizes have no common spread is no fault.
    assert not any("not rounding alone" in finding.sentence for finding in audited.findings)


def test_the_report_names_the_modes_in_turn_and_draws_terms_in_their_own_ranges(mixed):
    folder, deltas = mixed
    (summary,) = [table for table in report([folder]).tables if table.name == "summary"]
    assert summary.records()[0]["correction"] == "measured only, then bypass"
    spread = read_spread(group_by_seed([read_run(folder)])[0])
    assert (spread.num_steps, spread.num_bypass, spread.in_ranges, spread.limits) == (6, 3, True, (-1.0, 1.0))
    # The ranges of steps 1, 2, 5 and 6 are known; old and current log-probs are equal in 1 and 6.
    assert len(spread.ratios) == 4 * 64
    assert int((spread.ratios == 0).sum()) == 2 * 64
    assert [len(values) for values in spread.mismatch.values()] == [6 * 32, 5 * 32]
    chart_sections(group_by_seed([read_run(folder)]))


def test_the_noise_of_a_step_is_a_warning_in_bypass_mode_alone(tmp_path):
    """The rule looks at the step's own mode, whichever the run began with."""
    watch, levels = Watch(), []
    for step, bypass in enumerate([False, True], 1):
        fields, _ = drawn_step(step, 0.1, bypass=bypass, clip_ratio=1e-5, num_elements=SIZE)
        levels += [finding.level for finding in watch(step, **fields)[1] if finding.cause == "clip_noise"]
        flowcorr.dump(tmp_path, step, **fields)
    assert levels == ["note", "warning"]
    found = [finding for finding in report([tmp_path]).findings if finding.cause == "clip_noise"]
    assert [finding.level for finding in found] == ["warning"]


def test_a_step_without_log_probs_of_the_trainer_has_no_gap_of_zero(tmp_path):
    fields, _ = drawn_step(1, 0.1, bypass=True)
    alone = {name: fields[name] for name in ("rollout_log_probs", "advantages")}
    flowcorr.dump(tmp_path, 1, **alone)
    flowcorr.dump(tmp_path, 2, **fields, num_elements=SIZE)
    first, second = read_run(tmp_path).records
    assert not any(name.startswith("rollout_corr/") for name in first)
    assert second["rollout_corr/kl"] > 0
    assert audit_folder(tmp_path).fact("num_samples") == 32
    assert any(
        "were not dumped in 1 of 2 steps: no gap is known there" in note
        for note in read_dumped(tmp_path).notes
    )


def test_what_some_steps_lack_is_counted(tmp_path):
    for step in (1, 2, 3):
        more = {} if step == 2 else {"rewards": torch.arange(32), "num_elements": SIZE}
        flowcorr.dump(tmp_path, step, **drawn_step(step, 0.1, bypass=False)[0], **more, group_ids=[0, 1] * 16)
    notes = [note.split(",")[0] for note in read_dumped(tmp_path).notes]
    assert notes[:2] == ["not dumped: clip_ratio", "not dumped in 1 of 3 steps: rewards"]


@pytest.mark.parametrize("known", [1, 2, 3])
def test_exact_kls_of_some_steps_are_kept(known, tmp_path):
    for step in (1, 2, 3):
        kl = {"old_rollout_kl": torch.full((32, 2), 0.5)} if step == known else {}
        flowcorr.dump(tmp_path, step, **drawn_step(step, 0.1, bypass=False)[0], num_elements=SIZE, **kl)
    expected = SIZE * (2 * 0.5 + 2 * 2 * 0.1**2 / 2) / 3
    assert audit_folder(tmp_path).fact("joint_nats") == pytest.approx(expected, rel=0.01)


def test_a_loss_with_a_cap_is_not_held_against_our_default(tmp_path):
    fields, _ = drawn_step(1, 0.1, bypass=True, loss_mode="importance_cap", num_elements=SIZE)
    flowcorr.dump(tmp_path, 1, **fields)
    audited = audit_folder(tmp_path)
    assert (audited.fact("clip_limit"), audited.fact("outside_clip")) == (None, None)
    (presets,) = [table for table in audited.tables if table.name == "presets"]
    assert {row["clipped"] for row in presets.records()} == {None}
    assert any("importance_cap, which no dump holds" in note for note in read_dumped(tmp_path).notes)


@pytest.mark.parametrize("bypass", [False, True])
def test_without_a_clip_range_no_preset_says_what_it_clips(bypass, tmp_path):
    flowcorr.dump(tmp_path, 1, **drawn_step(1, 0.1, bypass=bypass, num_elements=SIZE)[0])
    (presets,) = [table for table in audit_folder(tmp_path).tables if table.name == "presets"]
    assert {row["clipped"] for row in presets.records()} == {None}
