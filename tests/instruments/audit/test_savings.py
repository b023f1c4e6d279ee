"""Cheaper rollouts beside the recipe's own: numbers by hand, and tables of the embedded model."""

import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from flowcorr.cli import main
from flowcorr.config import RewardConfig, RewardTerm, load
from flowcorr.errors import ConfigError
from flowcorr.instruments.audit import savings
from flowcorr.instruments.audit.savings import (
    advantages_of,
    audit_savings,
    cosine,
    over_prompts,
    rank_correlations,
    savings_of,
)
from tests.trainer.runs import SMALL

LONG = {"num_inference_steps": 6, "sde_window_range": (0, 2)}
STRIDES = [f"sampling.post_window_stride={stride}" for stride in (2, 3, 4)]
EMULATED = [f"rollout.emulate={name}" for name in ("fp8", "int8", "int4")]
JPEG = RewardConfig(terms=(RewardTerm(name="jpeg_compressibility"),))


def scrambled(images, prompts):
    """Scores that two images have in common only if all their pixels are equal."""
    return [float(hashlib.sha256(image.tobytes()).digest()[0]) for image in images]


@pytest.mark.parametrize(
    ("rewards", "others", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 99], 1.0),
        ([1, 2, 3, 4], [9, 7, 5, 3], -1.0),
        ([1, 1, 2, 2], [0, 1, 2, 3], 2 / math.sqrt(5)),  # ranks .5 .5 2.5 2.5
        ([1, 1, 2, 2], [5, 5, 6, 6], 1.0),
        ([1, 2, 3, 4], [5, 5, 5, 5], 0.0),
    ],
)
def test_ranks_average_over_ties(rewards, others, expected):
    found = rank_correlations(np.array([rewards], dtype=float), np.array([others], dtype=float))
    assert found == pytest.approx([expected])


def test_an_interval_is_that_of_a_mean_over_prompts():
    values = np.random.default_rng(1).normal(0.5, 0.2, 100)
    mean, low, high = over_prompts(lambda rows: values[rows].mean(), 100)
    assert mean == values.mean()
    half = 1.96 * values.std() / 10
    assert (mean - low, high - mean) == pytest.approx((half, half), rel=0.1)
    assert over_prompts(lambda rows: 1.0, 1) is None
    assert over_prompts(lambda rows: math.nan, 5) is None
    assert cosine(np.ones(4), np.array([1.0, 1.0, 1.0, -1.0])) == 0.5


def test_advantages_are_those_of_the_images_that_are_learned_from(small):
    config = small(rollout={"n": 4, "n_learned": 2})
    rewards = np.array([[3.0, 1.0, 2.0, 0.0], [5.0, 5.0, 9.0, 5.0]])
    found = advantages_of(rewards, config)
    half = math.sqrt(0.5)
    np.testing.assert_allclose(found, [[half, 0, 0, -half], [-half, 0, half, 0]], atol=1e-4)


def test_an_engine_offers_what_it_has(small):
    config = small(sampling=LONG)
    assert list(savings_of(config)) == [*STRIDES, "rollout.dtype=bfloat16", *EMULATED]
    shorter = replace(config.sampling, post_window_stride=2)
    rounded = replace(config.rollout, dtype="bfloat16", emulate="fp8")
    found = savings_of(replace(config, sampling=shorter, rollout=rounded))
    assert list(found) == [*STRIDES[1:], *EMULATED[1:]]
    engine = replace(config.rollout, name="vllm_omni", dtype="bfloat16", engine={"quantization": "fp8"})
    names = ["rollout.engine.quantization=int8", "rollout.engine.weight_sync=merged"]
    assert list(savings_of(replace(config, rollout=engine))) == [*STRIDES, *names]


def test_each_saving_says_what_it_changes(small):
    config = small(sampling=LONG, rollout={"prompts_per_step": 4, "n": 4})
    report = audit_savings(replace(config, reward=JPEG), num_batches=1)
    rows = {row["saving"]: row for row in report.table("savings")}
    assert list(rows) == [*STRIDES, "rollout.dtype=bfloat16", *EMULATED]
    own = report.fact("joint_nats")
    for name in STRIDES:
        assert rows[name]["joint_nats"] == own
    for name in EMULATED:
        assert rows[name]["seconds"] is None
    gaps = [rows[name]["r"] for name in ("rollout.emulate=int8", "rollout.emulate=int4")]
    assert math.sqrt(own) < gaps[0] < gaps[1]
    grey = [rows[name]["grey_levels"] for name in STRIDES]
    assert 0 < grey[0] < grey[2]
    for row in rows.values():
        for name in ("rank", "cosine"):
            value, low, high = row[name]
            assert -1 <= low <= value <= high <= 1
    lines = [finding for finding in report.findings if finding.cause == "saving"]
    assert [finding.sentence.partition(":")[0] for finding in lines] == list(rows)
    assert report.fact("num_prompts") == 4


def test_a_saving_that_an_engine_refuses_is_told_as_not_measured(small, monkeypatch):
    config = replace(small(sampling=LONG, rollout={"prompts_per_step": 2, "n": 2}), reward=JPEG)
    refused = replace(config, sampling=replace(config.sampling, height=17))
    cheaper = replace(config, sampling=replace(config.sampling, post_window_stride=2))
    monkeypatch.setattr(savings, "savings_of", lambda _: {"height": refused, STRIDES[0]: cheaper})
    report = audit_savings(config, num_batches=1)
    assert [row["saving"] for row in report.table("savings")] == [STRIDES[0]]
    assert report.findings[0].sentence.startswith("height: not measured, since ")
    assert "17" in report.findings[0].sentence


def test_rewards_that_lose_their_images_are_warned_of(small):
    scores = RewardConfig(terms=(RewardTerm(name=f"{__name__}:scrambled"),))
    config = replace(small(sampling=LONG, rollout={"prompts_per_step": 4, "n": 4}), reward=scores)
    report = audit_savings(config, num_batches=2)
    warned = [finding.sentence for finding in report.findings if finding.level == "warning"]
    assert set(STRIDES) <= {sentence.partition(":")[0] for sentence in warned}


def test_a_run_is_measured_with_the_weights_it_has_learned(tmp_path, capsys):
    run = str(tmp_path / "run")
    overrides = [
        *SMALL,
        "sampling.num_inference_steps=5",
        "trainer.total_steps=2",
        "rollout.n=4",
        "actor.lr=0.01",
    ]
    assert main(["train", "tiny_jpeg_lora", *overrides, "--out", run]) == 0
    capsys.readouterr()
    found = []
    for recipe in (run, str(tmp_path / "run" / "config.yaml")):
        assert main(["audit", recipe, "--savings", "--json", "--out", str(tmp_path / "out")]) == 0
        found.append(json.loads(capsys.readouterr().out)["tables"]["savings"])
    assert [row["saving"] for row in found[0]] == [row["saving"] for row in found[1]]
    assert found[0][0]["grey_levels"] != found[1][0]["grey_levels"]
    assert (tmp_path / "out" / "savings.html").is_file()


def test_no_batch_measures_nothing():
    with pytest.raises(ConfigError, match="^--batches 0 .* 1 "):
        audit_savings(load("tiny_jpeg_lora"), num_batches=0)
