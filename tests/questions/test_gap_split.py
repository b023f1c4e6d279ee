"""The gap of stale rollouts, split into the engine's part and that of older weights."""

import re
import shutil

import pytest
import torch

from flowcorr import config, dumps, trainer
from flowcorr.errors import BackendError, BatchError
from flowcorr.questions.gap_split import behaviour_scores, splits_gap
from flowcorr.records import Rollout
from flowcorr.rollout import Weights
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from tests.tolerances import LOG_PROBS, MEANS
from tests.trainer import runs

SMALL = (
    *runs.SMALL,
    "actor.mini_batches=1",
    "trainer.eval_every=0",
)
CORRECTION = "algorithm.rollout_correction"
STALE = ("rollout.staleness=2", "rollout.emulate=fp8", "rollout.drift_every=2")
PARTS = ("rollout_corr/engine/", "rollout_corr/staleness/")
BYPASS = f"{CORRECTION}={{preset: null, bypass_mode: true}}"
WITH_MEANS = f"{CORRECTION}={{preset: null, rollout_rs: step_kl, rollout_rs_threshold: 1.0}}"


def load(*overrides):
    return config.load("tiny_jpeg_lora", [*SMALL, *overrides])


def train(folder, *overrides, steps=4, resume=False):
    torch.manual_seed(0)
    trainer.train(load(*overrides, f"trainer.total_steps={steps}"), folder, resume=resume)
    return read_metrics(folder / "metrics.jsonl")


def lasting(record, without=()):
    """What depends neither on the clock nor on where the run ends."""
    without = ("timing/", "perf/", "eval/", *without)
    return {name: value for name, value in record.items() if not name.startswith(without)}


def tensors(folder):
    return checkpoint.load_latest(folder / "checkpoints")[1].tensors


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


@pytest.fixture(scope="module")
def stale(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stale")
    return folder, train(folder, *STALE)


@pytest.fixture
def history(make_run):
    """A run two versions behind: a rollout of each version, scored while its weights were the present ones."""
    run = make_run(rollout={"prompts_per_step": 2, "n": 2, "staleness": 2})
    rollouts, scores, versions = [], [], []
    for seed in range(3):
        run.engine.restore([run.actor.weights.snapshot()])
        rollouts.append(run.sample())
        scores.append(run.actor.log_probs(rollouts[-1], with_means=True))
        versions.append(run.actor.weights.snapshot())
        run.stir(seed=seed)
    return run, rollouts, scores, versions


# Scores under the weights that sampled -----------------------------------------------------------------------


def test_old_weights_score_as_they_did_and_the_present_ones_come_back(history):
    run, rollouts, scores, versions = history
    present = run.actor.weights.snapshot()
    for rollout, then in zip(rollouts, scores, strict=True):
        now = run.actor.log_probs(rollout)
        again = behaviour_scores(run.actor, rollout, versions, with_means=True)
        assert torch.equal(again.log_probs, then.log_probs)
        assert torch.equal(again.means, then.means)
        assert not torch.equal(now.log_probs, then.log_probs)
    assert_same_weights(run.actor.weights.snapshot().tensors, present.tensors)
    assert run.actor.weights.version == present.version


def test_samples_of_several_versions_are_scored_each_by_its_own(history):
    run, rollouts, scores, versions = history
    order = torch.tensor([5, 0, 8, 11, 2, 4, 9, 1])  # of four samples a version
    mixed = Rollout.concatenate(rollouts).select(order)
    assert mixed.policy_versions.tolist() == [1, 0, 2, 2, 0, 1, 2, 0]
    found = behaviour_scores(run.actor, mixed, versions, with_means=True)
    for name, tolerance in (("log_probs", LOG_PROBS), ("means", MEANS)):
        expected = torch.cat([getattr(score, name) for score in scores])[order]
        torch.testing.assert_close(getattr(found, name), expected, **tolerance)
    assert behaviour_scores(run.actor, mixed, versions, with_means=False).means is None


def test_a_version_that_is_not_kept_is_named(history):
    run, rollouts, _, versions = history
    with pytest.raises(BackendError, match=r"version 1 .* \[0, 2\]: "):
        behaviour_scores(run.actor, rollouts[1], [versions[0], versions[2]], with_means=False)


def test_the_present_weights_come_back_after_failures(history):
    run, rollouts, _, versions = history
    present = run.actor.weights.snapshot().tensors
    *_, last = present
    damaged = {**versions[0].tensors, last: torch.zeros(3)}  # found out when the others have been loaded
    with pytest.raises(BatchError, match=rf"{re.escape(last)} .* \[3\] "):
        behaviour_scores(run.actor, rollouts[0], [Weights(version=0, tensors=damaged)], with_means=False)
    assert_same_weights(run.actor.weights.snapshot().tensors, present)
    with pytest.raises(KeyError), run.actor.weights.swapped(versions[0].tensors):
        raise KeyError
    assert_same_weights(run.actor.weights.snapshot().tensors, present)


# In training -------------------------------------------------------------------------------------------------


def assert_parts_add_up(record):
    """Log-ratios, to the rounding of float32 log-probs; those of one rollout differ from rounding by far."""
    engine, staleness = (record[f"{part}kl"] for part in PARTS)
    assert engine + staleness == pytest.approx(record["rollout_corr/kl"], abs=LOG_PROBS["atol"])
    assert all(record[f"{part}logprob_abs_diff_mean"] > 2e-5 for part in PARTS)


def test_the_parts_are_measured_on_schedule_and_add_up(stale):
    _, records = stale
    for step, record in enumerate(records):
        names = {name for name in record if name.startswith((*PARTS, "timing/drift"))}
        sizes = ("kl", "k3_kl", "logprob_abs_diff_mean", "logprob_abs_diff_max")
        expected = {part + size for part in PARTS for size in sizes} | {"timing/drift"}
        assert names == (expected if step in (2, 4) else set())
    for record in (records[2], records[4]):
        assert_parts_add_up(record)
        assert record["timing/drift"] > 0


@pytest.mark.parametrize(
    "overrides",
    [(BYPASS,), ("model.lora.rank=0",), ("actor.micro_batch_size=3",)],
    ids=["bypass", "full weights", "micro-batches"],
)
def test_they_add_up_in_every_mode(overrides, tmp_path):
    assert_parts_add_up(train(tmp_path, *STALE, *overrides, steps=2)[2])


def test_exact_kls_are_of_the_step_means(tmp_path):
    record = train(tmp_path, *STALE, WITH_MEANS, steps=2)[2]
    assert_parts_add_up(record)
    engine, staleness = (record[f"{part}exact_kl"] ** 0.5 for part in PARTS)
    total = record["rollout_corr/exact_kl"] ** 0.5  # r is a norm, of which the triangle inequality holds
    assert abs(engine - staleness) < total < engine + staleness
    # Sampled by the engine, -delta has the exact KL as its mean.
    assert engine**2 == pytest.approx(record[f"{PARTS[0]}kl"], abs=3 * engine * (2 / (8 * 512)) ** 0.5)


def test_measuring_changes_nothing_else(stale, tmp_path):
    folder, records = stale
    off = train(tmp_path, *STALE, "rollout.drift_every=0")
    assert [lasting(record, PARTS) for record in records] == list(map(lasting, off))
    assert_same_weights(*(weights(path) for path in (folder, tmp_path)))


def weights(folder):
    return {name: value for name, value in tensors(folder).items() if name.startswith("weights/")}


def test_resumed_equals_uninterrupted(stale, tmp_path):
    folder, records = stale
    resumed = shutil.copytree(folder, tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    again = train(resumed, *STALE, resume=True)
    assert list(map(lasting, again)) == list(map(lasting, records))
    assert_same_weights(*(weights(path) for path in (folder, resumed)))


@pytest.mark.parametrize("loss", ["flow_grpo", "grpo_guard"])
def test_the_behaviour_as_the_old_policy_leaves_staleness_in_the_ratio(loss, tmp_path):
    choice = (*STALE, "rollout.drift_every=1", f"actor.loss_mode={loss}", "actor.old_policy=behaviour")
    records = train(tmp_path, *choice, "trainer.dump_log_probs=true", steps=2)
    second = records[2]
    # The correction is left the engine's part; staleness is in the ratio, before the first update too.
    for size in ("kl", "k3_kl", "logprob_abs_diff_mean", "logprob_abs_diff_max"):
        assert second[f"{PARTS[0]}{size}"] == pytest.approx(second[f"rollout_corr/{size}"], rel=1e-9)
    terms = dumps.load(tmp_path / "log_probs" / "step_000002.safetensors")
    drift = (terms.current_log_probs - terms.old_log_probs).double()
    assert -drift.mean() == pytest.approx(second[f"{PARTS[1]}kl"], abs=LOG_PROBS["atol"])
    assert drift.abs().mean() > 2e-5
    first = records[1]  # nothing was learned yet
    assert (first[f"{PARTS[1]}kl"], first[f"{PARTS[1]}logprob_abs_diff_max"]) == (0, 0)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("rollout.staleness=1",), [10, 20]),
        (("rollout.staleness=1", "rollout.drift_every=7", BYPASS), [7, 14]),
        (("rollout.placement=ray", "rollout.max_staleness=2"), [10, 20]),
        (("rollout.emulate=fp8",), []),
        (("rollout.staleness=1", "rollout.drift_every=0"), []),
        (("rollout.staleness=1", f"{CORRECTION}=null"), []),
    ],
)
def test_nothing_is_measured_where_there_is_one_part_or_no_interest(overrides, steps):
    settings = load(*overrides)
    assert [step for step in range(1, 21) if splits_gap(settings, step)] == steps
