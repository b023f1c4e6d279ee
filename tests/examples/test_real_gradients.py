"""The statistics of gradients by hand, and the whole command, tiny."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_gradients"
MODULES = ("measure", "quality", "run")
SMALL = (
    "rollout.prompts_per_step=2",
    "rollout.n=4",
    "sampling.num_inference_steps=4",
    "sampling.sde_window_size=3",
    "sampling.sde_window_range=[0, 3]",
    "data.num_train=8",
)


@pytest.fixture
def example(monkeypatch):
    """The example's modules, imported as its command does."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name)


def gradients(seed, batches=6, size=200):
    return torch.randn(batches, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_halved_gradient_has_half_the_length_as_bias_and_the_same_cosine(example):
    on_policy = gradients(0) + 1.0
    found = example.quality.assess(on_policy / 2, on_policy, on_policy)
    for end in (found.bias.value, found.bias.low, found.bias.high):
        assert end == pytest.approx(0.5)
    assert found.variance == pytest.approx(0.25)
    assert found.cosine == pytest.approx(example.quality.on_policy_cosine(on_policy))
    assert found.twin == pytest.approx(1.0)
    assert (found.gain.low, found.gain.high) == (pytest.approx(0.0), pytest.approx(0.0))


def test_a_drift_is_the_bias_and_noise_is_none(example):
    on_policy = gradients(1) + 1.0
    drift = torch.ones(200, dtype=torch.float64)
    drift[:100] = -1.0  # as long as the expectation of the gradient, and perpendicular to it
    shifted = example.quality.assess(on_policy + drift, on_policy, on_policy)
    squared = (on_policy.sum(0).square().sum() - on_policy.square().sum()) / 30
    assert shifted.bias.value == pytest.approx((200 / squared).sqrt().item())
    assert shifted.bias.low < 1.0 < shifted.bias.high
    assert shifted.gain.high < 0  # its cosine is lower

    noise = torch.eye(200, dtype=torch.float64)[:6] * 20  # products of different batches are 0
    noisy = example.quality.assess(on_policy + noise, on_policy, on_policy)
    assert noisy.bias.value == 0.0
    assert noisy.variance > 2
    assert noisy.cosine < shifted.cosine


def test_the_gain_is_a_paired_difference(example):
    on_policy = gradients(2) + 1.0
    worse = on_policy + gradients(3)
    found, other = (example.quality.assess(one, on_policy, worse) for one in (on_policy, worse))
    assert found.gain.value == pytest.approx(found.twin - other.twin)
    assert found.gain.low > 0
    assert other.gain == example.quality.Interval(value=0.0, low=0.0, high=0.0)


def test_intervals_hold_the_truth_as_often_as_they_say(example):
    """Of 100 draws with a bias of exactly 1, some 95; a binomial has fewer than 86 once in ten thousand times."""
    hits = 0
    for seed in range(100):
        on_policy = gradients(seed, size=60) / 4 + 1.0
        estimate = on_policy + gradients(1000 + seed, size=60) / 4 + torch.ones(60, dtype=torch.float64)
        found = example.quality.assess(estimate, on_policy, on_policy).bias
        hits += found.low <= 1.0 <= found.high
    assert hits >= 86


@pytest.mark.system
def test_the_command_writes_both_tables_and_goes_on_where_it_was(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example.measure, "TRAINED", 2)
    monkeypatch.setattr(example.measure, "LAG", 1)
    settings, batches = ("two/own",), {"two": 3}
    example.run.main(tmp_path, settings, batches, SMALL)
    assert capsys.readouterr().out.count("two/own: batch") == 3
    on_policy, by_gap, drifts = example.run.stored(tmp_path, "two/own", batches)
    for gap, of_correction in by_gap.items():
        assert not torch.equal(of_correction["none"], on_policy), gap
        assert not torch.equal(of_correction["centering"], of_correction["none"]), gap
    assert drifts.shape == (3, len(example.run.GAPS))
    # Equal for all states, so that advantages of mean 0 cancel it in the step means.
    assert drifts[:, example.run.GAPS.index("offset")].max() < 1e-6
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n| ") == 1 + len(example.run.GAPS)
    (tmp_path / "two_own_01.safetensors").unlink()
    example.run.main(tmp_path, settings, batches, SMALL)
    assert capsys.readouterr().out.count("two/own: batch") == 1
    assert (tmp_path / "table.md").read_text() == table
