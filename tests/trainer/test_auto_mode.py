"""Runs whose mode follows the noise of the rollout."""

import logging

import pytest
import torch

from flowcorr import config, trainer
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import checkpoint
from tests.trainer import runs
from tests.trainer.runs import lasting

SMALL = (
    *runs.SMALL,
    "trainer.eval_every=0",
    "algorithm.rollout_correction.preset=null",
)
AUTO = "algorithm.rollout_correction.bypass_mode=auto"
NOISY = (AUTO, "rollout.emulate=int4", "actor.clip_ratio=1.0e-4")
OWN = ("rollout_corr/bypass", "rollout_corr/noise_quantile")


def train(folder, *overrides, steps=3, resume=False):
    torch.manual_seed(0)
    settings = config.load("tiny_jpeg_lora", [*SMALL, *overrides, f"trainer.total_steps={steps}"])
    trainer.train(settings, folder, resume=resume)
    return read_metrics(folder / "metrics.jsonl")


def tensors(folder):
    return checkpoint.load_latest(folder / "checkpoints")[1].tensors


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A run with int4 rollouts and a clip range far below their noise."""
    folder = tmp_path_factory.mktemp("noisy")
    return folder, train(folder, *NOISY)


def test_noise_beyond_the_clip_range_ends_bypass(noisy):
    _, records = noisy
    assert [record["rollout_corr/bypass"] for record in records[1:]] == [1, 0, 0]
    assert [record["timing/old_log_prob"] > 0 for record in records[1:]] == [False, True, True]
    first, second = records[1:3]
    assert first["rollout_corr/noise_quantile_low"] > 1
    # In bypass, ratios start outside the clip range; recomputed, within it.
    assert first["rollout_corr/clip_noise_fraction"] > 0.5
    assert second["rollout_corr/clip_noise_fraction"] > 0.5
    assert "actor/rollout_corr/kl" in first
    assert "actor/rollout_corr/kl" not in second
    assert abs(second["actor/ratio_mean"] - 1) < abs(first["actor/ratio_mean"] - 1) / 2


@pytest.mark.parametrize(
    "loss",
    [
        ("actor.loss_mode=grpo_guard", "actor.clip_ratio=1.0e-5"),
        ("actor.loss_mode=importance_cap", "actor.importance_cap=1.0001"),
        ("actor.clip_ratio=[1.0e-4, 1.0e-4, 2.0e-4]",),
    ],
    ids=["grpo_guard", "importance_cap", "clip_by_step"],
)
def test_every_loss_with_a_range_measures_it_in_both_modes(loss, tmp_path):
    records = train(tmp_path, AUTO, "rollout.emulate=int4", *loss, steps=2)
    assert [record["rollout_corr/bypass"] for record in records[1:]] == [1, 0]
    assert records[2]["rollout_corr/noise_quantile"] > 1


def test_resumed_is_uninterrupted(noisy, tmp_path, caplog):
    whole, records = noisy
    with caplog.at_level(logging.WARNING, logger="flowcorr.algorithm.auto_mode"):
        train(tmp_path, *NOISY, steps=2)
        assert ["decoupled" in text for text in caplog.messages] == [True]
        caplog.clear()
        again = train(tmp_path, *NOISY, resume=True)
    assert caplog.text == ""
    for record, expected in zip(again[1:], records[1:], strict=True):
        ours = {name: value for name, value in lasting(record).items() if not name.startswith("eval/")}
        assert ours.items() <= lasting(expected).items()
    ours, theirs = tensors(tmp_path), tensors(whole)
    assert ours.keys() == theirs.keys()
    assert {name for name, value in ours.items() if not torch.equal(value, theirs[name])} == set()
    assert ours["auto_mode/window"].shape[0] == 3


def test_noise_within_the_clip_range_is_bypass_mode_throughout(tmp_path):
    folders = [tmp_path / name for name in ("auto", "bypass")]
    auto, bypass = (
        train(folder, mode, steps=2)
        for folder, mode in zip(folders, (AUTO, "algorithm.rollout_correction.bypass_mode=true"), strict=True)
    )
    assert [record["rollout_corr/bypass"] for record in auto[1:]] == [1, 1]
    for record, expected in zip(auto, bypass, strict=True):
        assert {k: v for k, v in lasting(record).items() if not k.startswith(OWN)} == lasting(expected)
    ours, theirs = (tensors(folder) for folder in folders)
    assert {name for name in ours if not name.startswith("auto_mode/")} == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
