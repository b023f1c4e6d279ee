"""Small whole runs, and comparisons of what they leave."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from flowcorr import config
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import Silent, checkpoint
from tests.shallow import SHALLOW

SMALL = (
    f"model.path={SHALLOW}",
    "sampling.height=16",
    "sampling.width=32",
    "model.lora.rank=4",
    "sampling.num_inference_steps=4",
    "sampling.sde_window_range=[0, 3]",
    "rollout.prompts_per_step=2",
    "rollout.n=2",
    "data.num_train=5",
    "data.num_heldout=4",
    "trainer.total_steps=4",
    "trainer.eval_every=2",
    "trainer.eval_num_inference_steps=2",
    "trainer.save_every=2",
    "trainer.image_every=0",
    "trainer.num_threads=1",  # in every process, so that all make the same calls
)


STALE = (
    "sampling.sde_window_range=[0, 2]",
    "sampling.post_window_stride=2",
    "rollout.n=3",
    "rollout.n_learned=2",
    "rollout.staleness=2",
    "rollout.emulate=int8",
    "actor.ema=0.9",
    "actor.warmup_steps=5",
    "algorithm.rollout_correction.preset=bypass_ppo_clip",
)


class Recorder(Silent):
    """Notes what a run says, and does something after a step or as a phase of one begins."""

    def __init__(self, at_step=None, then=None, *, phase=None):
        self.steps, self.evals, self.messages, self.phases, self.results = [], {}, [], [], []
        self.at_step, self.then, self.phase = at_step, then, phase

    def on_phase(self, name):
        self.phases.append(name)
        if self.phase == name and self.at_step == len(self.steps) + 1:
            self.then()

    def on_step(self, step, metrics):
        self.steps.append(step)
        if self.phase is None and step == self.at_step:
            self.then()

    def on_eval(self, step, metrics):
        self.evals[step] = metrics

    def on_message(self, text):
        self.messages.append(text)

    def on_finish(self, result):
        self.results.append(result)


def small_config(*overrides):
    return config.load("tiny_jpeg_lora", [*SMALL, *overrides])


# How long anything takes, and which Ray worker samples a shard.
UNLIKE = ("timing/", "perf/", "rollout_corr/worker_")


def lasting(record):
    """A record without the fields that depend on the clock."""
    return {name: value for name, value in record.items() if not name.startswith(UNLIKE)}


def records(folder: Path):
    """The run's records, without what depends on the clock."""
    return [lasting(record) for record in read_metrics(folder / "metrics.jsonl")]


def checkpoints(folder: Path):
    return [path.name for path in checkpoint.folders(folder / "checkpoints")]


def assert_same_run(one: Path, other: Path):
    """All metrics, the last and the best checkpoint agree bit for bit."""
    assert records(one) == records(other)
    last, best = (checkpoint.load_latest(one / "checkpoints")[1].facts[key] for key in ("config", "best"))
    for step in {last["trainer"]["total_steps"], best[0]}:
        first, second = (checkpoint.folder_of(folder / "checkpoints", step) for folder in (one, other))
        assert (first / "state.json").read_bytes() == (second / "state.json").read_bytes()
        for name in ("state.safetensors", "pytorch_lora_weights.safetensors"):
            ours, theirs = load_file(first / name), load_file(second / name)
            assert ours.keys() == theirs.keys()
            differ = {key for key, value in ours.items() if not torch.equal(value, theirs[key])}
            assert differ == set()


def assert_same_weights(one: Path, other: Path, step: int):
    ours, theirs = (
        load_file(checkpoint.folder_of(folder / "checkpoints", step) / "state.safetensors")
        for folder in (one, other)
    )
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def interrupt(number):
    return lambda: os.kill(os.getpid(), number)
