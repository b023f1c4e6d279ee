"""Runs on two ranks are those of one; run as a script, this file is a rank that dies or hangs."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flowcorr import config, distributed, dumps, sde, trainer
from flowcorr.errors import FlowcorrError
from flowcorr.models import DTYPES
from flowcorr.rewards.jpeg import JpegCompressibility
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from flowcorr.trainer.events import read_events
from tests.ranks import Ranks, end_with_first, start_ranks
from tests.shallow import SHALLOW
from tests.trainer import test_fault

SMALL = (
    f"model.path={SHALLOW}",
    "sampling.height=16",
    "sampling.width=32",
    "model.lora.rank=4",
    "sampling.num_inference_steps=3",
    "sampling.sde_window_range=[0, 3]",
    "rollout.prompts_per_step=5",
    "rollout.n=3",
    "actor.micro_batch_size=3",
    "data.num_train=5",
    "data.num_heldout=3",
    "trainer.total_steps=2",
    "trainer.eval_every=1",
    "trainer.save_every=1",
)
OWN = "reward.terms=[{name: 'tests.trainer.test_ranks:Fragile', options: {fails_for: [oask, zmwg]}}]"
EVEN = "reward.terms=[{name: 'tests.trainer.test_ranks:Fragile', options: {same_for: [oask, zmwg]}}]"
CORRECTION = "algorithm.rollout_correction"
# Name -> overrides. Each has five groups, three of them on the first rank, where nothing else is said.
CASES = {
    "decoupled": (
        "rollout.emulate=int8",
        "actor.ema=0.9",
        "actor.epochs=2",
        "algorithm.advantage_std=global",
        "reward.terms=[{name: jpeg_compressibility, normalize: global}, {name: jpeg_incompressibility, weight: 0.1}]",
        f"{CORRECTION}={{preset: null, rollout_is: token, rollout_is_batch_normalize: true, rollout_rs: "
        "'token_k1,step_z', rollout_rs_threshold: [auto, 1.5], rejection_groups: drop_small}",
        "trainer.dump_log_probs=true",
        "rollout.replay_every=1",
    ),
    "grpo_guard": (
        "rollout.staleness=1",
        "rollout.drift_every=1",
        "actor.loss_mode=grpo_guard",
        "actor.fold_steps=false",
        "actor.kl_coef=0.01",
        f"{CORRECTION}={{preset: null, bypass_mode: true, rollout_rs: token_k1, rollout_rs_threshold: [0.997, 1.003]}}",
    ),
    "few_groups": (  # a rank has no group in some mini-batches
        "rollout.prompts_per_step=3",
        "rollout.emulate=int4",
        "actor.mini_batches=3",
        f"{CORRECTION}={{preset: null, bypass_mode: true}}",
        "trainer.dump_log_probs=true",
    ),
    "auto": (
        "rollout.n=4",
        "rollout.n_learned=2",
        "rollout.emulate=int4",
        "actor.clip_ratio=1e-4",
        f"{CORRECTION}={{preset: null, bypass_mode: auto}}",
    ),
    "dropped": (
        "rollout.prompts_per_step=2",
        "rollout.n_learned=2",
        "reward.on_error=drop_group",
        OWN,
    ),  # a rank has no group at all
    "full": ("rollout.prompts_per_step=4", "rollout.n=2", "actor.ema=0.5", "model.lora.rank=0", EVEN),
}
CASES["eight"] = (*CASES["decoupled"], "rollout.prompts_per_step=8", "rollout.n=2", "actor.epochs=1")
CASES["fsdp"] = (*CASES["full"], "actor.fsdp=true")
CASES["fsdp, adapter"] = (
    *CASES["eight"],
    "rollout.n=3",
    "rollout.n_learned=2",
    "actor.fsdp=true",
    "actor.kl_coef=0.01",
    "actor.ema=0.5",
    EVEN,
)
CASES["fsdp, apart"] = (
    *CASES["fsdp"],
    "rollout.emulate=int8",
    "rollout.replay_every=1",
    "rollout.staleness=1",
    "rollout.drift_every=1",
    "actor.old_policy=behaviour",
    "actor.fold_steps=false",
    "actor.mini_batches=3",
    "actor.gradient_checkpointing=true",
    "actor.kl_coef=0.01",
    "reward.on_error=drop_group",
    OWN.replace("oask, zmwg", "oask"),  # each rank keeps a group
)
SOME = ("decoupled", "dropped", "fsdp", "fsdp, adapter")
EVALUATED_TWICE = "trainer.eval_every=0"  # before and after training
QUICK = ("trainer.collective_timeout=40", EVALUATED_TWICE)
CONTINUED = ("grpo_guard", "fsdp, adapter", "fsdp, apart")  # on another number of ranks
SLOW = tuple(case for case in CASES if case not in SOME)


class Fragile:
    """The JPEG reward, which fails for some prompts, and on the second rank does something at its `call`-th call.

    It gives all images of some other prompts the same score.
    """

    def __init__(self, fails_for=(), same_for=(), call=None, then="raise"):
        self.fails_for, self.same_for, self.call, self.then = fails_for, same_for, call, then
        self.reward, self.calls = JpegCompressibility(), 0

    def __call__(self, images, prompts):
        self.calls += 1
        if self.calls == self.call and distributed.rank() == 1:
            if self.then == "raise":
                raise RuntimeError("the scorer is gone")
            if self.then == "hang":
                time.sleep(3000)
            os.kill(os.getpid(), getattr(signal, self.then))
        scores = np.array(self.reward(images, prompts).scores)
        scores[[prompt.text in self.same_for for prompt in prompts]] = 0.0
        scores[[prompt.text in self.fails_for for prompt in prompts]] = np.nan
        return scores


def settings(case, *overrides):
    return config.load("tiny_jpeg_lora", [*SMALL, *CASES.get(case, ()), *overrides])


def fragile(call, then):
    return f"reward.terms=[{{name: 'tests.trainer.test_ranks:Fragile', options: {{call: {call}, then: {then}}}}}]"


@contextlib.contextmanager
def in_float64():
    """Models that compute in float64: then a sample's log-probs are the same whatever batch it is scored in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DTYPES, "float32", torch.float64)
        yield


@in_float64()
def on_ranks(folder, cases):
    """What the ranks do, each case in a folder of its own."""
    for case in cases:
        trainer.train(settings(case), folder / f"{case}, many")
        if case in CONTINUED:
            trainer.train(settings(case, "trainer.total_steps=1"), folder / f"{case}, 2 to 1")
            trainer.train(settings(case), folder / f"{case}, 1 to 2", resume=True)


def spoiled(noise):
    """Initial noise that is not finite but for the evaluation before training."""

    def draw(*places, training_step, **key):
        return noise(*places, training_step=training_step, **key) * (math.nan if training_step else 1.0)

    return draw


def error_of(run, folder):
    with pytest.raises(FlowcorrError) as caught:
        trainer.train(run, folder)
    return f"{caught.type.__name__}: {caught.value}"


@in_float64()
def endings(folder):
    """On the second rank: a signal and a reward that fails, in the second training step; latents that diverge.

    The reward is called at the first evaluation, in the first training step, by its replay, and then in the second one.

    The latents diverge in a run whose metrics are sums over the step means of all ranks.
    """
    signalled = settings(None, fragile(4, "SIGTERM"), "trainer.total_steps=9", EVALUATED_TWICE)
    result = trainer.train(signalled, folder / "signal")
    error = error_of(
        settings(None, fragile(4, "raise"), "trainer.save_every=9", EVALUATED_TWICE), folder / "failure"
    )
    with pytest.MonkeyPatch.context() as patch:
        if distributed.rank() == 1:
            patch.setattr(sde, "initial_noise", spoiled(sde.initial_noise))
        diverged = error_of(settings("grpo_guard", EVALUATED_TWICE), folder / "diverged")
    return {"result": result, "error": error, "diverged": diverged}


@in_float64()
def break_one_engine(folder):
    """From the third training step on, the log-probs of the second rank's engine are wrong."""
    if distributed.rank() == 1:
        test_fault.Breaking.fault = staticmethod(test_fault.wrong_log_probs)
    stops = ("trainer.total_steps=4", "trainer.save_every=9", test_fault.NAME, EVALUATED_TWICE)
    return error_of(settings(None, *stops), folder)


@in_float64()
def both(folder, cases, ranks):
    """A folder with each case on one rank and on more, and begun on one to be continued on more and the other way."""
    continued = [case for case in cases if case in CONTINUED]
    for case in continued:
        trainer.train(settings(case, "trainer.total_steps=1"), folder / f"{case}, 1 to 2")
    ranks.call(on_ranks, folder, cases)
    for case in continued:
        trainer.train(settings(case), folder / f"{case}, 2 to 1", resume=True)
    for case in cases:
        trainer.train(settings(case), folder / f"{case}, one")
    return folder


@pytest.fixture(scope="module")
def usual(two_ranks, tmp_path_factory):
    return both(tmp_path_factory.mktemp("usual"), SOME, two_ranks)


@pytest.fixture(scope="module")
def rare(two_ranks, tmp_path_factory):
    return both(tmp_path_factory.mktemp("rare"), SLOW, two_ranks)


@pytest.fixture(scope="module")
def ended(two_ranks, tmp_path_factory):
    """The folder of runs that ended early, and how each rank saw them end."""
    folder = tmp_path_factory.mktemp("ended")
    return folder, two_ranks.call(endings, folder)


@in_float64()
def run_out_of_memory(folder):
    """On the second rank, between two forward passes of sharded weights: the first waits until the second exits."""
    with pytest.MonkeyPatch.context() as patch:
        if distributed.rank() == 1:
            patch.setattr(sde, "step_noise", out_of_memory(sde.step_noise))
        error = error_of(settings("fsdp", EVALUATED_TWICE), folder)
    raise SystemExit(error)


def out_of_memory(noise):
    """Noise of a step for which the GPU has no memory left, but for the first step of a sample."""

    def draw(*places, step_index, **key):
        if step_index:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return noise(*places, step_index=step_index, **key)

    return draw


# Which worker samples a shard, and how long anything takes.
UNLIKE = ("timing/", "perf/", "rollout_corr/worker_")


def records(folder):
    return [
        {name: value for name, value in record.items() if not name.startswith(UNLIKE)}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def ways():
    for case in CASES:
        for way in ("many", "2 to 1", "1 to 2") if case in CONTINUED else ("many",):
            yield pytest.param(case, way, marks=pytest.mark.system if case in SOME else pytest.mark.slow)


@pytest.mark.parametrize(("case", "way"), list(ways()))
def test_two_ranks_are_one(case, way, request):
    folder = request.getfixturevalue("usual" if case in SOME else "rare")
    assert_same_run(folder / f"{case}, {way}", folder / f"{case}, one")


@pytest.mark.slow
def test_four_ranks_are_one(tmp_path):
    ranks = Ranks(4)
    both(tmp_path, ["eight"], ranks)
    ranks.close()
    assert_same_run(tmp_path / "eight, many", tmp_path / "eight, one")


def assert_same_run(two, one, *, config=True):
    """Metrics, weights, averages, optimizer state and dumped log-probs agree to rounding; `config` to the letter."""
    expected, got = records(one), records(two)
    assert len(expected) == len(got) == 3
    for theirs, ours in zip(expected, got, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)
    theirs, ours = (checkpoint.load(path / "checkpoints" / "step_000002") for path in (one, two))
    assert_close(ours.tensors, theirs.tensors)
    best, expected_best = ours.facts.pop("best"), theirs.facts.pop("best")
    assert best == pytest.approx(expected_best, rel=1e-6)
    if not config:
        del ours.facts["config"], theirs.facts["config"]
    assert ours.facts == theirs.facts
    if (one / dumps.FOLDER).exists():
        dumped = [dumps.load(path / dumps.FOLDER / "step_000002.safetensors") for path in (two, one)]
        assert_close(*(terms.tensors() for terms in dumped))


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-5, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_cases_are_what_they_are_for(usual):
    """Some terms are rejected, a rank is left without samples, and weights move."""
    second = records(usual / "decoupled, one")[2]
    assert 0 < second["rollout_corr/rollout_rs_masked_fraction"] < 0.5
    first = records(usual / "dropped, one")[1]
    assert (first["reward/failed_samples"], first["actor/updates"], first["actor/skipped_updates"]) == (
        3,
        1,
        1,
    )
    for case in SOME:
        weights = [
            checkpoint.load(usual / f"{case}, one" / "checkpoints" / f"step_{step:06d}").group("weights")
            for step in (1, 2)
        ]
        assert max((weights[1][name] - value).abs().max() for name, value in weights[0].items()) > 1e-4


def test_sharded_weights_are_saved_whole(usual):
    one, many = (usual / f"fsdp, {number}" / "checkpoints" / "step_000002" for number in ("one", "many"))
    assert_close(*(load_file(next((path / "transformer").glob("*.safetensors"))) for path in (many, one)))
    assert (many / "transformer" / "config.json").read_text() == (
        one / "transformer" / "config.json"
    ).read_text()


def test_a_signal_to_any_rank_ends_all_after_the_same_step(ended):
    folder, ranks = ended
    for ending in ranks:
        result = ending["result"]
        assert (result.status, result.signal, result.step) == ("interrupted", signal.SIGTERM, 2)
    assert checkpoint.load_latest(folder / "signal" / "checkpoints")[1].step == 2
    kinds = [event["kind"] for event in read_events(folder / "signal" / "events.jsonl")]
    assert kinds.count("end") == 1


def test_a_failure_of_any_rank_ends_all_with_its_reason(ended):
    folder, ranks = ended
    first, second = (ending["error"] for ending in ranks)
    assert second.startswith("BackendError: reward Fragile")
    assert first.startswith("RankError: rank 1")
    assert first.endswith(f": {second}")
    assert "rank 1" in (folder / "failure" / "failure.txt").read_text()
    assert second.partition(": ")[2] in (folder / "failure" / "failure_rank1.txt").read_text()
    assert checkpoint.load_latest(folder / "failure" / "checkpoints")[1].step == 1


def test_latents_that_diverge_on_one_rank_leave_no_rank_waiting(ended):
    first, second = (ending["diverged"] for ending in ended[1])
    assert second.startswith("BackendError: sample 0")
    assert "not finite" in second
    assert first.startswith("RankError: rank 1")
    assert first.endswith(f": {second}")


def test_a_fault_of_one_ranks_engine_stops_all_alike(tmp_path):
    ranks = Ranks(2)
    first, second = ranks.call(break_one_engine, tmp_path, timeout=120)
    ranks.close()
    assert first == second
    assert first.startswith("RolloutFault: training step 3")
    assert checkpoint.load_latest(tmp_path / "checkpoints")[1].step == 2
    step = dumps.load(dumps.files(tmp_path / "fault")[3])
    groups, shifted = step.group_ids, (step.old_log_probs - step.rollout_log_probs).abs().amax(1) > 1e-4
    assert groups[shifted].unique().tolist() == [3, 4]  # those of the second rank
    assert len(groups.unique()) == 5


def test_a_rank_that_waits_in_a_sharded_forward_pass_is_told_why(tmp_path):
    ranks = Ranks(2)
    first, second = ranks.call(run_out_of_memory, tmp_path, timeout=60)
    ranks.close()
    assert second.startswith("BackendError: ")
    assert "memory in rollout" in second
    assert first.startswith("RankError: rank 0")
    assert first.endswith(f"rank 1 failed: {second}")
    assert first.removeprefix("RankError: ") in (tmp_path / "failure.txt").read_text()
    assert second.removeprefix("BackendError: ") in (tmp_path / "failure_rank1.txt").read_text()


def test_one_rank_alone_writes(usual):
    assert {path.name for path in (usual / "decoupled, many").iterdir()} == {
        path.name for path in (usual / "decoupled, one").iterdir()
    }
    steps = [record["step"] for record in read_metrics(usual / "decoupled, many" / "metrics.jsonl")]
    assert steps == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("then", ["SIGKILL", "hang"])
def test_a_rank_that_is_gone_or_hangs_is_named_in_bounded_time(then, tmp_path):
    processes = start_ranks(2, Path(__file__), tmp_path, then)
    first, _ = end_with_first(processes, timeout=600)
    said = "rank 0 of 2 gave up waiting for the rewards: rank 1 ended or hangs after the largest pass"
    assert said in first.stderr
    assert said in (tmp_path / "run" / "failure.txt").read_text()

    with in_float64():
        assert_resumed(then, tmp_path)


def assert_resumed(then, tmp_path):
    calm = settings(None, fragile(2, then), *QUICK)  # one rank alone never fails
    trainer.train(calm, tmp_path / "run", resume=True)
    trainer.train(calm, tmp_path / "whole")
    resumed, whole = records(tmp_path / "run"), records(tmp_path / "whole")
    assert [record["step"] for record in resumed] == [0, 1, 2]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)


if __name__ == "__main__":
    folder, then = sys.argv[1:]
    with in_float64():
        trainer.train(settings(None, fragile(2, then), *QUICK), Path(folder) / "run")
