"""Another trainer's run, watched: the values are those of training and of the report, and each finding comes once."""

from dataclasses import replace

import pytest
import torch
from instruments.dumped_runs import D, terms_of
from instruments.foreign_dumps import draw_steps

import flowcorr
from flowcorr import config, dumps, trainer
from flowcorr.algorithm.apply import correct
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.dumps import StepFields
from flowcorr.errors import BatchError
from flowcorr.instruments.audit import audit_folder
from flowcorr.instruments.gap_words import mean_gap
from flowcorr.instruments.report.runs import read_run
from flowcorr.instruments.steps import as_terms
from flowcorr.instruments.watch import Watch
from flowcorr.trackers import read_metrics
from tests.shallow import SHALLOW

NAMES = (
    "rollout_log_probs",
    "old_log_probs",
    "advantages",
    "current_log_probs",
    "group_ids",
    "stds",
    "step_indices",
)


def given(terms, *, bypass=False):
    """What a trainer would hand over."""
    values = {name: getattr(terms, name) for name in NAMES if not (bypass and name == "old_log_probs")}
    return values | {"num_elements": D, "clip_ratio": 1e-4}


RUN = (
    f"model.path={SHALLOW}",
    "sampling.height=16",
    "sampling.width=32",
    "sampling.num_inference_steps=4",
    "sampling.sde_window_range=[0, 3]",
    "rollout.prompts_per_step=2",
    "rollout.n=4",
    "rollout.emulate=int4",
    "rollout.replay_every=0",
    "data.num_train=4",
    "data.num_heldout=2",
    "algorithm.rollout_correction.preset=disabled",
    "trainer.dump_log_probs=true",
    "trainer.total_steps=2",
    "trainer.eval_every=0",
    "trainer.image_every=0",
)


def test_the_metrics_are_those_that_training_logged(tmp_path):
    """And the gap that the run's last line names is the one of its audit."""
    run = config.load("tiny_jpeg_lora", [*RUN, "sampling.sde_window_range=[0, 2]"])
    trainer.train(run, tmp_path)
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert all("rollout_corr/exact_kl" not in record for record in records)
    assert audit_folder(tmp_path).fact("joint_nats") == pytest.approx(mean_gap(run, records), rel=0.03)
    logged = {record["step"]: record for record in read_metrics(tmp_path / "metrics.jsonl")}
    for step, path in dumps.files(tmp_path).items():
        terms, record = dumps.load(path), logged[step]
        names = (*NAMES, "old_rollout_kl")
        taken = {name: value for name, value in terms.tensors().items() if name in names}
        metrics, _ = Watch()(step, **taken, num_elements=terms.num_elements)
        shared = metrics.keys() & record.keys()
        assert {"rollout_corr/kl", "rollout_corr/k3_kl"} <= shared
        for name in shared:
            assert metrics[name] == pytest.approx(record[name], rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize("bypass", [False, True])
def test_the_metrics_are_those_of_the_correction(bypass):
    """Of the function that a trainer calls, in both modes."""
    terms = terms_of(bypass=bypass)
    metrics, _ = Watch()(1, **given(terms, bypass=bypass))
    correction = RolloutCorrectionConfig(bypass_mode=bypass)
    actor = replace(config.load("tiny_jpeg_lora").actor, clip_ratio=1e-4)
    _, expected = correct(as_terms(terms), correction, actor_config=None if bypass else actor, num_steps=2)
    assert metrics == expected.compute()


def test_the_metrics_are_those_of_the_report(tmp_path):
    draw_steps(tmp_path)
    records = read_run(tmp_path).records
    watch = Watch()
    for record, path in zip(records, dumps.files(tmp_path).values(), strict=True):
        terms = dumps.load(path)
        metrics, _ = watch(
            record["step"],
            **terms.tensors(),
            num_elements=terms.num_elements,
            clip_ratio=1e-4,
            version=terms.version,
        )
        assert metrics == {name: value for name, value in record.items() if name.startswith("rollout_corr/")}


def test_a_step_that_was_scored_before_and_is_no_more_is_a_finding():
    terms, watch = terms_of(), Watch()
    watch(1, **given(terms))
    broken = terms.old_log_probs.clone()
    broken[:, 1] = torch.nan
    metrics, findings = watch(2, **given(replace(terms, old_log_probs=broken)))
    assert metrics["rollout_corr/nonfinite_fraction"] == 0.5
    assert "non_finite" in {finding.cause for finding in findings}
    _, findings = Watch()(1, **given(replace(terms, old_log_probs=broken)))
    assert "non_finite" not in {finding.cause for finding in findings}  # nobody trains it


def test_trained_steps_that_move_are_no_finding():
    watch = Watch()
    for step, column in enumerate((0, 0, 1, 0), start=1):
        terms = terms_of(seed=step)
        old = terms.old_log_probs.clone()
        old[:, column] = torch.nan
        metrics, findings = watch(step, **given(replace(terms, old_log_probs=old)))
        assert metrics["rollout_corr/nonfinite_fraction"] == 0
        assert "non_finite" not in {finding.cause for finding in findings}


@pytest.mark.parametrize("bypass", [False, True])
def test_trained_steps_of_each_samples_own_are_no_finding(bypass, tmp_path):
    """As in DanceGRPO, which trains a random part of the steps; the audit reads them, too."""
    terms, untrained = terms_of(), torch.zeros(len(terms_of().advantages), 2, dtype=torch.bool)
    untrained[torch.arange(len(untrained)), torch.arange(len(untrained)) % 2] = True
    current = terms.old_log_probs.masked_fill(untrained, torch.nan)
    fields = given(replace(terms, current_log_probs=current), bypass=bypass)
    _, findings = Watch()(1, **fields)
    assert {"non_finite", "update_nonfinite"}.isdisjoint(finding.cause for finding in findings)
    flowcorr.dump(tmp_path, 1, **fields)
    report = audit_folder(tmp_path)
    assert (report.fact("num_samples"), report.fact("num_steps")) == (len(current), 1)


def test_grpo_guards_clip_range_is_not_held_against_another_ratio():
    terms = terms_of()
    steps = [
        Watch()(1, **given(terms) | {"clip_ratio": 1e-9, "loss_mode": mode})
        for mode in ("flow_grpo", "grpo_guard")
    ]
    (_, plain), (metrics, guarded) = steps
    assert "clip_noise" in {finding.cause for finding in plain}
    assert "rollout_corr/clip_noise_fraction" not in metrics
    assert "clip_noise" not in {finding.cause for finding in guarded}


def test_a_clip_range_for_each_step_of_the_schedule():
    terms = given(terms_of()) | {"step_indices": [1, 3]}
    Watch()(1, **terms | {"clip_ratio": [1e-4] * 4})
    with pytest.raises(BatchError, match="clip_ratio holds 3 .*step_indices reaches 3;"):
        Watch()(1, **terms | {"clip_ratio": [1e-4] * 3})


def test_a_finding_comes_once():
    terms = terms_of()
    terms = replace(terms, old_log_probs=terms.rollout_log_probs - 0.5)
    watch = Watch()
    (first,) = [finding for finding in watch(7, **given(terms))[1] if finding.cause == "kl"]
    assert (first.numbers["step"], first.level, first.fault) == (
        7,
        "warning",
        False,
    )  # its precision is unknown
    assert watch(8, **given(terms))[1] == []
    assert [finding.cause for finding in Watch()(8, **given(terms))[1]].count("kl") == 1


def test_a_cause_is_told_once():
    terms = terms_of()
    summed = replace(terms, rollout_log_probs=1000 + terms.rollout_log_probs)
    watch = Watch()
    found = watch(1, **given(summed))[1]
    assert (found[0].cause, found[0].fault) == ("summed", True)
    assert found[0].numbers["median |log p| of the engine"] > 100 * found[0].numbers["of the trainer"]
    assert "summed" not in [finding.cause for finding in watch(2, **given(summed))[1]]


@pytest.mark.parametrize(
    ("missing", "rules"),
    [({"clip_ratio", "num_elements"}, ["clip_noise", "shared_shift"]), ({"num_elements"}, ["shared_shift"])],
)
def test_rules_that_lack_a_field_are_named_once(missing, rules):
    watch, terms = Watch(), given(terms_of())
    fewer = {name: value for name, value in terms.items() if name not in missing}
    (note,) = [finding for finding in watch(3, **fewer)[1] if finding.cause == "files"]
    assert (note.level, note.numbers["step"]) == ("note", 3)
    assert (note.numbers["rules"], set(note.numbers["missing"])) == (rules, missing)
    assert watch(4, **fewer)[1] == []


def test_a_loss_without_a_clip_range_lacks_none():
    terms = given(terms_of())
    del terms["clip_ratio"]
    for loss, told in (("flow_grpo", True), ("reinforce", False), ("importance_cap", False)):
        findings = Watch()(3, **terms, loss_mode=loss)[1]
        assert ("files" in [finding.cause for finding in findings]) == told


def test_a_size_that_was_given_once_is_kept():
    watch, terms = Watch(), given(terms_of())
    assert watch(1, **terms)[0].keys() == watch(2, **terms | {"num_elements": None})[0].keys()


def test_a_rule_with_patience_waits(tmp_path):
    """Groups whose rewards are equal are a finding on the third step."""
    terms = given(terms_of()) | {"rewards": torch.zeros(24)}
    watch = Watch()
    rules = [[finding.cause for finding in watch(step, **terms)[1]] for step in range(4)]
    assert [("flat_groups" in found) for found in rules] == [False, False, True, False]


@pytest.mark.parametrize("wrong", [False, True])
def test_the_kl_of_a_bypass_loop_is_that_of_the_policy_that_its_loss_scores(wrong):
    """Of the means of other steps, it is far from what the log-probs say."""
    watch, told = Watch(), []
    for step in range(3):
        terms = terms_of(bypass=True)
        gap = terms.current_log_probs - terms.rollout_log_probs
        kl = torch.full_like(gap, 5.0 if wrong else float(gap.square().mean() * D / 2))
        fields = given(terms, bypass=True) | {"old_rollout_kl": kl, "before_update": torch.ones_like(gap)}
        metrics, findings = watch(step, **fields)
        told += [finding.cause for finding in findings]
    assert metrics["rollout_corr/exact_kl"] == pytest.approx(float(kl.mean()))
    assert ("bookkeeping" in told) == wrong


def test_what_was_learned_is_left_out():
    terms = terms_of(bypass=True)
    late = torch.arange(24)[:, None].expand(24, 2) % 2 == 1
    learned = torch.where(late, terms.current_log_probs + 1, terms.current_log_probs)
    both = given(terms, bypass=True) | {"current_log_probs": learned, "before_update": ~late}
    metrics, _ = Watch()(1, **both)
    half = {name: value[::2] for name, value in given(terms, bypass=True).items() if torch.is_tensor(value)}
    alone, _ = Watch()(1, **half, num_elements=D)
    for name, value in alone.items():
        assert metrics[name] == pytest.approx(value)


def test_a_step_scored_after_updates_alone_is_no_error():
    late = given(terms_of(bypass=True), bypass=True) | {"before_update": torch.zeros(24, 2)}
    _, findings = Watch()(1, **late)
    assert findings == []


def test_the_log_probs_of_the_rollout_alone_are_refused():
    terms = given(terms_of(bypass=True), bypass=True)
    del terms["current_log_probs"]
    with pytest.raises(BatchError, match=r"flowcorr\.watch .*: old_log_probs .*current_log_probs"):
        Watch()(1, **terms)


def test_it_takes_what_dump_takes_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    terms = terms_of()
    everything = given(terms) | {
        "before_update": torch.ones(24, 2),
        "rewards": terms.rewards,
        "sigmas": terms.sigmas,
        "old_rollout_kl": torch.zeros(24, 2),
        "drift_squares": torch.zeros(24, 2),
        "gradient_squares": torch.ones(24, 2),
        "policy_versions": torch.zeros(24),
        "version": 0,
        "loss_mode": "flow_grpo",
        "adv_clip_max": 5.0,
    }
    assert StepFields.__annotations__.keys() == everything.keys()
    metrics, _ = flowcorr.watch(1, **everything)
    assert metrics["rollout_corr/exact_kl"] == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="odd"):
        flowcorr.watch(1, **everything, odd=terms.stds)
