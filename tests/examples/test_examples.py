"""The examples run as they stand."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from flowcorr.config.schema import ActorConfig
from flowcorr.errors import ConfigError
from flowcorr.records import Terms
from flowcorr.trackers import METRICS_FILE, read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_loop_learns_and_measures_the_gap(capsys):
    history = load("own_loop").main(3)
    assert len(history) == 3
    for metrics in history:
        assert all(math.isfinite(value) for value in metrics.values())
        assert 1e-6 < metrics["rollout_corr/logprob_abs_diff_mean"] < 1e-2  # bfloat16 against float32
        assert 0.5 < metrics["rollout_corr/rollout_is_eff_sample_size"] <= 1
    assert capsys.readouterr().out.startswith("step 1: reward ")


def test_custom_reward_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    small = (
        "rollout.prompts_per_step=2",
        "rollout.n=2",
        "sampling.num_inference_steps=4",
        "data.num_heldout=4",
    )
    example = load("custom_reward")
    result = example.main(str(tmp_path / "ink"), 1, *small, "data.num_train=8")
    assert result.status == "finished"
    assert 0 < result.metrics["eval/reward"] < 100
    assert "held-out ink after 1 steps" in capsys.readouterr().out
    sys.modules.pop("custom_reward", None)


def test_custom_loss_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    small = (
        "rollout.prompts_per_step=2",
        "rollout.n=2",
        "sampling.num_inference_steps=4",
        "data.num_heldout=4",
        "data.num_train=8",
    )
    example = load("custom_loss")
    result = example.main(str(tmp_path / "run"), 1, *small)
    assert result.status == "finished"
    assert "held-out exact match after 1 steps" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"loss_options=\{'over': 1\} do not fit .*it takes \(terms: .*above: float"
    ):
        example.main(str(tmp_path / "other"), 1, "actor.loss_options=null", "actor.loss_options={over: 1}")
    sys.modules.pop("custom_loss", None)


def test_new_engine_trains_and_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    small = (
        "rollout.prompts_per_step=2",
        "rollout.n=2",
        "sampling.num_inference_steps=4",
        "data.num_heldout=4",
        "data.num_train=8",
        "rollout.replay_every=1",
    )
    example = load("new_engine")
    gaps = {}
    for dtype in ("bfloat16", "float16"):
        options = f"rollout.engine={{computes_in: {dtype}}}"
        result = example.main(str(tmp_path / dtype), 1, *small, options)
        assert result.status == "finished"
        measured = [
            step.get("rollout_corr/logprob_abs_diff_mean")
            for step in read_metrics(tmp_path / dtype / METRICS_FILE)
        ]
        gaps[dtype] = max(filter(None, measured))
    assert 0 < gaps["float16"] < gaps["bfloat16"] < 1e-2
    assert "held-out exact match after 1 steps" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"^rollout\.staleness=2 .* cannot be used with rollout\.name=new_engine"
    ):
        example.main(str(tmp_path / "stale"), 1, *small, "rollout.staleness=2")
    sys.modules.pop("new_engine", None)


def test_custom_loss_is_what_it_says():
    log_ratio = torch.tensor([-0.3, 0.15, 0.3, 0.3])
    terms = Terms(
        log_prob=log_ratio,
        std=torch.ones(4),
        step=torch.ones(4),
        old_log_prob=torch.zeros(4),
        rollout_log_prob=torch.zeros(4),
        advantage=torch.tensor([-1.0, 1.0, 1.0, -1.0]),
        step_index=torch.zeros(4, dtype=torch.int64),
    )
    loss = load("custom_loss").CLIP_HIGHER.objective(terms, ActorConfig(clip_ratio=0.1), above=0.2)
    # Cut at .9, not cut, cut at 1.2, and not cut where it is the pessimistic side.
    expected = 0.9 - math.exp(0.15) - 1.2 + math.exp(0.3)
    assert loss.loss_sum.item() == pytest.approx(expected, rel=1e-5)
    assert loss.metrics.compute()["actor/pg_clipfrac_higher"] == 0.5


def test_custom_reward_is_what_it_says():
    import numpy as np

    images = np.full((2, 4, 4, 3), 255, dtype=np.uint8)
    images[1, :2] = 0
    assert load("custom_reward").ink(images, []).tolist() == pytest.approx([0, 50])
