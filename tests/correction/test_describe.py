"""The size of a drift by itself."""

import math

import pytest
import torch

from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.correction.describe import SIZES, drift_metrics
from flowcorr.metrics import Metrics

ROLLOUT = torch.tensor([[-1.0, -1.5], [-2.0, -0.5]])
DELTA = torch.tensor([[0.1, -0.3], [0.2, -0.2]])
STEP_KL = torch.tensor([[0.01, 0.02], [0.03, 0.04]])


def test_sizes_by_hand():
    values = Metrics(drift_metrics(ROLLOUT + DELTA, ROLLOUT, step_kl=STEP_KL, prefix="part/")).compute()
    k3 = [math.expm1(delta) - delta for delta in (0.1, -0.3, 0.2, -0.2)]
    assert values == pytest.approx(
        {
            "part/kl": 0.05,
            "part/k3_kl": sum(k3) / 4,
            "part/logprob_abs_diff_mean": 0.2,
            "part/logprob_abs_diff_max": 0.3,
            "part/exact_kl": 0.025,
        },
        rel=1e-5,
    )


def test_only_terms_that_the_mask_has_on_count():
    mask = torch.tensor([[True, False], [True, True]])
    values = Metrics(drift_metrics(ROLLOUT + DELTA, ROLLOUT, mask=mask, prefix="")).compute()
    assert set(values) == set(SIZES) - {"exact_kl"}
    assert values["kl"] == pytest.approx(-0.1 / 3, rel=1e-5)
    assert values["logprob_abs_diff_max"] == pytest.approx(0.2, rel=1e-5)


def test_they_are_those_of_the_correction():
    draw = torch.Generator().manual_seed(0)
    rollout, target, step_kl = (torch.randn(3000, 3, generator=draw) for _ in range(3))
    step_kl = step_kl.square()
    target[5, 1] = math.nan
    whole = correct(target, rollout, step_kl=step_kl).metrics.compute()
    sizes = Metrics(drift_metrics(target, rollout, step_kl=step_kl, prefix="rollout_corr/")).compute()
    assert sizes == {name: whole[name] for name in sizes}
    assert len(sizes) == len(SIZES)


def test_no_samples_are_no_metrics():
    empty = torch.zeros(0, 2)
    part = Metrics(drift_metrics(ROLLOUT + DELTA, ROLLOUT, prefix=""))
    assert Metrics(drift_metrics(empty, empty, prefix="")).compute() == {}
    assert Metrics(drift_metrics(empty, empty, prefix="")).merge(part).compute() == part.compute()


def test_a_step_mode_is_told_by_sample_too():
    """Each sample's mean of the mode's values, with the bounds of a step."""
    delta = torch.tensor([[0.2, 0.0], [-0.4, -0.2], [0.1, 0.1]], dtype=torch.float64)
    values = correct(
        delta,
        torch.zeros(3, 2).double(),
        rollout_rs="token_k1,seq_sum_k2",
        rollout_rs_threshold=["0.8_1.15", 0.1],
    ).metrics.compute()
    step = {name: values[f"rollout_corr/rollout_rs_token_k1_seq_{name}"] for name in ("mean", "min", "max")}
    assert step == pytest.approx({"mean": 0.1 / 3, "min": -0.1, "max": 0.3})
    assert values["rollout_corr/rollout_rs_token_k1_seq_std"] == pytest.approx(
        torch.tensor([-0.1, 0.3, -0.1]).std()
    )
    assert values["rollout_corr/rollout_rs_token_k1_seq_max_deviation"] == pytest.approx(0.3)
    assert values["rollout_corr/rollout_rs_token_k1_seq_fraction_low"] == pytest.approx(1 / 3)
    assert values["rollout_corr/rollout_rs_token_k1_seq_fraction_high"] == 0
    assert values["rollout_corr/rollout_rs_token_k1_seq_masked_fraction"] == pytest.approx(2 / 3)
    for name in ("mean", "std", "min", "max", "fraction_high"):
        sums = "rollout_corr/rollout_rs_seq_sum_k2_"
        assert values[f"{sums}seq_{name}"] == values[f"{sums}{name}"]


def test_fractions_of_a_k1_band_are_of_the_ratio():
    ratio = torch.tensor([[0.1], [1.0], [1.0], [5.0], [6.0]])
    values = correct(
        ratio.log(), torch.zeros(5, 1), rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0
    ).metrics.compute()
    assert values["rollout_corr/rollout_rs_seq_mean_k1_fraction_high"] == pytest.approx(0.4)
    assert values["rollout_corr/rollout_rs_seq_mean_k1_fraction_low"] == pytest.approx(0.2)
    assert values["rollout_corr/rollout_rs_seq_mean_k1_masked_fraction"] == pytest.approx(0.6)


def test_the_bookkeeping_check_accepts_noise_and_refuses_a_shift():
    torch.manual_seed(1)
    num_samples, num_elements, std, r = 4000, 256, 0.5, 0.05
    shift = r * std
    noise = torch.randn(num_samples, num_elements, dtype=torch.float64)
    delta = ((std * noise) ** 2 - (std * noise - shift) ** 2).mean(1, keepdim=True) / (2 * std**2)
    z = (delta + r**2 / 2) * math.sqrt(num_elements) / r
    assert abs(float(z.mean())) < 4 / math.sqrt(num_samples)
    assert abs(float(z.var()) - 1.0) < 4 * math.sqrt(2 / num_samples)
    kl = torch.full_like(delta, r**2 / 2)
    values = correct(delta, torch.zeros_like(delta), step_kl=kl, num_elements=num_elements).metrics.compute()
    assert values["rollout_corr/exact_kl"] == pytest.approx(r**2 / 2)
    assert values["rollout_corr/bookkeeping_z_max"] == pytest.approx(float(z.abs().max()))
    assert values["rollout_corr/bookkeeping_z_max"] < 5.0
    wrong = correct(delta + 0.02, torch.zeros_like(delta), step_kl=kl, num_elements=num_elements)
    assert wrong.metrics.compute()["rollout_corr/bookkeeping_z_max"] > 6.0


def test_rows_by_step_index():
    delta = torch.tensor([[0.1, -0.3], [0.2, 0.4]], dtype=torch.float64)
    indices = torch.tensor([[1, 3], [1, 0]])
    for num_steps in (5, None):
        values = correct(
            delta,
            torch.zeros_like(delta),
            torch.tensor([[1, 1], [1, 0]]),
            rollout_is="token",
            rollout_rs="token_k1",
            rollout_rs_threshold=1.15,
            step_indices=indices,
            num_steps=num_steps,
        ).metrics.compute()
        rows = {name: value for name, value in values.items() if "/step_" in name}
        assert {name.split("/")[1] for name in rows} == {"step_1", "step_3"}
        assert rows["rollout_corr/step_1/kl"] == pytest.approx(-0.15)
        assert rows["rollout_corr/step_1/logprob_abs_diff"] == pytest.approx(0.15)
        assert rows["rollout_corr/step_1/rollout_is_mean"] == pytest.approx(
            (math.exp(0.1) + math.exp(0.2)) / 2
        )
        assert rows["rollout_corr/step_1/masked_fraction"] == 0.5
        assert rows["rollout_corr/step_3/k3_kl"] == pytest.approx(math.expm1(-0.3) + 0.3)
        assert rows["rollout_corr/step_3/masked_fraction"] == 1.0


def test_a_step_that_is_not_finite_is_masked_in_its_row():
    delta = torch.tensor([[0.1, math.nan], [0.2, 0.1]], dtype=torch.float64)
    values = correct(
        delta, torch.zeros_like(delta), step_indices=torch.tensor([[0, 1], [0, 1]]), num_steps=2
    ).metrics.compute()
    assert values["rollout_corr/step_0/masked_fraction"] == 0.0
    assert values["rollout_corr/step_1/masked_fraction"] == 0.5
    assert values["rollout_corr/step_1/kl"] == pytest.approx(-0.1)


def test_rows_merge_whichever_step_indices_the_parts_hold():
    delta = torch.tensor([[0.1, -0.3], [0.2, 0.4], [0.5, -0.7]], dtype=torch.float64)
    indices = torch.tensor([[0, 1], [1, 5], [0, 2]])

    def found(rows, **options):
        part = correct(delta[rows], torch.zeros_like(delta[rows]), rollout_is="token", **options)
        return part.metrics

    whole = found(slice(None), step_indices=indices, num_steps=7).compute()
    parts = [found([row], step_indices=indices[[row]]) for row in (2, 0, 1)]
    assert Metrics(*parts).compute() == pytest.approx(whole, rel=1e-12)
    rows = {name.split("/")[1] for name in whole if "/step_" in name}
    assert rows == {f"step_{index}" for index in (0, 1, 2, 5)}
    # The rows are beside everything else, which merges with parts that have none.
    mixed = parts[0].merge(found([0])).merge(found([1])).compute()
    assert mixed["rollout_corr/kl"] == pytest.approx(whole["rollout_corr/kl"])
    assert mixed["rollout_corr/step_2/kl"] == pytest.approx(0.7)
