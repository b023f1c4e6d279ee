"""The dumped terms of training steps: what they hold, how they are written, and that they change nothing."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowcorr import config, dumps, trainer
from flowcorr.algorithm import apply_bypass_mode_to_diffusion_batch
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.instruments.audit.dumped import audit_folder, presets_of
from flowcorr.instruments.steps import read_dumped
from flowcorr.instruments.steps import records as dumped_records
from flowcorr.trackers import read_metrics
from flowcorr.trainer import checkpoint
from flowcorr.trainer.log_probs import logged_terms, sampled_terms
from tests.tolerances import LOG_PROBS
from tests.trainer.runs import SMALL as SMALL_RUN
from tests.trainer.runs import records

SMALL = (
    *SMALL_RUN,
    "rollout.emulate=int4",
    "data.num_heldout=2",
    "trainer.total_steps=3",
    "trainer.eval_every=0",
)
CORRECTION = "algorithm.rollout_correction"
DUMPS = {"dump_log_probs": True}
BYPASS = {"rollout_correction": RolloutCorrectionConfig.bypass_ppo_clip()}


def small_config(*overrides):
    return config.load("tiny_jpeg_lora", [*SMALL, *overrides])


def logged(batch, update, *, bypass=False):
    rewards = batch.advantages.numpy()
    sampled = sampled_terms(batch, advantages=batch.advantages, rewards=rewards, bypass=bypass)
    return logged_terms(sampled, batch, update)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run with and without a dump."""
    folder = tmp_path_factory.mktemp("runs")
    trainer.train(small_config("trainer.dump_log_probs=true"), folder / "dumped")
    trainer.train(small_config(), folder / "plain")
    return folder / "dumped", folder / "plain"


def test_longer_steps_after_the_window_leave_what_a_step_dumps(tmp_path):
    dumped = []
    for stride in (1, 2):
        folder = tmp_path / str(stride)
        steps = ("sampling.num_inference_steps=5", f"sampling.post_window_stride={stride}")
        trainer.train(small_config(*steps, "trainer.total_steps=1", "trainer.dump_log_probs=true"), folder)
        dumped.append(dumps.load(dumps.files(folder)[1]).tensors())
    whole, longer = dumped
    for name in ("step_indices", "timesteps", "sigmas", "sigmas_next", "rollout_log_probs", "old_log_probs"):
        assert torch.equal(longer[name], whole[name]), name
    assert not torch.equal(longer["rewards"], whole["rewards"])


def assert_same(one, other):
    assert (one.num_elements, one.bypass) == (other.num_elements, other.bypass)
    assert one.tensors().keys() == other.tensors().keys()
    for name, value in one.tensors().items():
        torch.testing.assert_close(value, other.tensors()[name], rtol=0, atol=0, equal_nan=True)


def test_a_dump_changes_nothing_else(runs):
    dumped, plain = runs
    assert records(dumped) == records(plain)
    ours, theirs = (
        checkpoint.load_latest(folder / "checkpoints")[1].group("weights") for folder in (dumped, plain)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert list(dumps.files(dumped)) == [1, 2, 3]
    assert not (plain / "log_probs").exists()


def test_terms_are_those_of_the_step(runs):
    dumped, _ = runs
    logged = {record["step"]: record for record in records(dumped) if "actor/ppo_kl" in record}
    for step, path in dumps.files(dumped).items():
        found, metrics = dumps.load(path), logged[step]
        gap = found.rollout_log_probs.double() - found.old_log_probs.double()
        assert gap.mean().item() == pytest.approx(metrics["rollout_corr/kl"], rel=1e-9)
        update = (found.old_log_probs - found.current_log_probs).double()
        assert update.mean().item() == pytest.approx(metrics["actor/ppo_kl"], rel=1e-9)
        assert found.rewards.double().mean().item() == pytest.approx(metrics["reward/mean"], rel=1e-6)
        assert found.advantages.sum().item() == pytest.approx(0, abs=1e-6)
        assert found.num_elements == 128
        assert not found.bypass


def test_the_first_mini_batch_is_scored_by_the_old_policy(runs):
    found = dumps.load(dumps.files(runs[0])[1])
    gap = (found.current_log_probs - found.old_log_probs).abs()
    first, second = sorted(gap[found.group_ids == group].max() for group in found.group_ids.unique())
    assert first < LOG_PROBS["atol"]
    assert second > 100 * LOG_PROBS["atol"]


def test_a_resumed_run_drops_what_is_later_and_writes_it_again(runs, tmp_path):
    whole, _ = runs
    killed = shutil.copytree(whole, tmp_path / "killed")
    shutil.rmtree(killed / "checkpoints" / "step_000003")
    late = dumps.files(killed)[2].with_name("step_000009.safetensors")
    late.write_bytes(b"of a step that never was")
    trainer.train(small_config("trainer.dump_log_probs=true"), killed, resume=True)
    assert not late.exists()
    assert list(dumps.files(killed)) == [1, 2, 3]
    for step, path in dumps.files(killed).items():
        assert_same(dumps.load(path), dumps.load(dumps.files(whole)[step]))


@pytest.mark.parametrize(
    "actor",
    [
        {"mini_batches": 2, "micro_batch_size": 3},
        {"mini_batches": 2, "fold_steps": False},
        {"epochs": 2},
    ],
)
def test_each_term_is_recorded_where_it_stands(make_run, actor):
    run = make_run(actor={"lr": 1e-3, "mini_batches": 1, "loss_mode": "grpo_guard", **actor}, trainer=DUMPS)
    run.stir()
    batch = run.batch()
    update, last = run.learn(batch), {}
    for part in update.parts:
        for place, value in zip(part.places.flatten(), part.terms.log_prob.flatten(), strict=True):
            last[place.item()] = value.item()
        rollout_log_probs = batch.rollout.log_probs.flatten()[part.places.flatten()]
        assert torch.equal(rollout_log_probs, part.terms.rollout_log_prob.flatten())
    found = logged(batch, update)
    assert found.current_log_probs.flatten().tolist() == [last[place] for place in range(len(last))]
    assert len(last) == batch.rollout.log_probs.numel()
    assert not torch.equal(found.current_log_probs, found.old_log_probs)
    torch.testing.assert_close(found.current_log_probs, found.old_log_probs, rtol=0, atol=0.2)


def test_kls_are_those_of_the_steps(make_run):
    rollout = {"prompts_per_step": 2, "n": 4, "emulate": "int4"}
    run = make_run(rollout=rollout, actor={"mini_batches": 2}, trainer=DUMPS)
    batch = run.batch()
    found = logged(batch, run.learn(batch))
    stds = batch.rollout.window.stds[(...,) + (None,) * 3].double()
    old, rollout = (Normal(means.double(), stds) for means in (batch.old_means, batch.rollout.window.means))
    expected = kl_divergence(old, rollout).flatten(2).mean(-1)
    torch.testing.assert_close(found.old_rollout_kl.double(), expected, rtol=1e-4, atol=1e-12)
    still = (found.current_log_probs - found.old_log_probs).abs().amax(1) < LOG_PROBS["atol"]
    assert still.double().mean() == 0.5
    assert found.current_old_kl[still].max() < 1e-9  # half the square of a rounded mean, in units of the std
    assert found.current_old_kl[~still].min() > 1e-5
    torch.testing.assert_close(
        found.current_rollout_kl[still], found.old_rollout_kl[still], rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("preset", ["bypass_ppo_clip", "disabled"])
def test_the_drift_of_a_dump_is_that_which_was_logged(tmp_path, preset):
    overrides = (
        f"{CORRECTION}.preset={preset}",
        f"{CORRECTION}.score_centering=true",  # asks the engine for its means
        "rollout.emulate=int4",
        "rollout.n=4",  # all of one reward would have no gradient to drift
        "actor.mini_batches=1",
        "trainer.dump_log_probs=true",
        "actor.mini_batches=1",  # of one group whose rewards are equal there is no drift
    )
    trainer.train(small_config(*overrides), tmp_path)
    name = "rollout_corr/score_drift"
    drifts = [record[name] for record in read_metrics(tmp_path / "metrics.jsonl") if name in record]
    assert len(drifts) == 3
    told = [record[name] for record in dumped_records(read_dumped(tmp_path))]
    assert told == pytest.approx(drifts, rel=1e-5)
    table, parts = audit_folder(tmp_path).table("steps"), []
    for step in dumps.files(tmp_path):
        found = dumps.load(dumps.files(tmp_path)[step])
        parts.append(
            torch.stack([found.step_indices, found.drift_squares, found.gradient_squares]).flatten(1)
        )
    index, drift, gradient = torch.cat(parts, 1)
    for row in table:
        here = index == row["step_index"]
        share = drift[here].nansum() / gradient[here].nansum()
        assert row["score_drift"] == pytest.approx(share.item(), rel=1e-5)


def test_without_means_there_are_no_kls(make_run):
    run = make_run(trainer=DUMPS)
    rollout = run.sample()
    rollout = replace(rollout, window=replace(rollout.window, means=None, stds=None))
    batch = replace(run.batch(rollout), old_means=None)
    known = logged(batch, run.learn(batch)).tensors()
    assert not {name for name in known if name.endswith(("_kl", "_squares"))}


@pytest.mark.parametrize(
    ("actor", "fresh"),
    [
        ({"mini_batches": 2}, 0.5),
        ({"mini_batches": 2, "fold_steps": False, "micro_batch_size": 3}, 0.5),
        ({"mini_batches": 1}, 1.0),
        ({"mini_batches": 1, "epochs": 2}, 0.0),  # the last score of a term is kept
    ],
)
def test_terms_scored_before_the_first_update_are_marked(make_run, actor, fresh):
    run = make_run(actor={"lr": 1e-2, **actor}, algorithm=BYPASS, trainer=DUMPS)
    batch = apply_bypass_mode_to_diffusion_batch(run.batch())
    untouched = run.actor.log_probs(batch.rollout).log_probs
    found = logged(batch, run.learn(batch), bypass=True)
    marked = found.before_update.bool()
    assert marked.double().mean() == fresh
    learned = (found.current_log_probs - untouched).abs() > 10 * LOG_PROBS["atol"]
    assert torch.equal(learned.any(1), ~marked.any(1))


def test_a_skipped_update_leaves_the_weights_as_they_were(make_run):
    """So the second mini-batch of the step is scored before its first update too."""
    run = make_run(actor={"mini_batches": 2}, algorithm=BYPASS, trainer=DUMPS)
    batch = apply_bypass_mode_to_diffusion_batch(run.batch())
    batch = replace(batch, keep=torch.zeros_like(batch.old_log_probs, dtype=torch.bool))
    update = run.learn(batch)
    assert update.metrics.compute()["actor/skipped_updates"] == 2
    assert logged(batch, update, bypass=True).before_update.all()


def test_the_gap_of_a_bypass_run_holds_nothing_that_was_learned(tmp_path):
    """Two updates a step: the gap is of terms before the first; presets are replayed on all of them."""
    bypass = f"{CORRECTION}.preset=bypass_ppo_clip"
    learning = (bypass, "actor.mini_batches=2", "actor.lr=1e-2", "trainer.dump_log_probs=true")
    trainer.train(small_config(*learning, "rollout.emulate=none", "trainer.total_steps=2"), tmp_path)
    report = audit_folder(tmp_path)
    steps = [dumps.load(path) for path in dumps.files(tmp_path).values()]
    marked = torch.cat([terms.before_update for terms in steps]).bool()
    gap = torch.cat([terms.current_log_probs - terms.rollout_log_probs for terms in steps]).abs()
    assert gap[~marked].max() > 100 * gap[marked].max()
    assert report.fact("num_samples") == marked.all(1).sum() == len(marked) / 2
    told = " ".join(finding.sentence for finding in report.findings if finding.cause == "files")
    assert str(int((~marked).sum())) in told.split()
    (own,) = [found.numbers for found in presets_of(read_dumped(tmp_path)) if found.of_run]
    losses = [record["actor/loss"] for record in records(tmp_path) if "actor/loss" in record]
    assert own["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
