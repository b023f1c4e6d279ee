"""The correction against a plain-Python float64 reference, and the properties it must have."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr import distributed
from flowcorr.correction import Mode
from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.errors import BatchError, ConfigError
from flowcorr.metrics import Metrics

RS_CHAIN = (
    "token_k1,token_k2,token_k3,seq_sum_k1,seq_sum_k2,seq_sum_k3,"
    "seq_mean_k1,seq_mean_k2,seq_mean_k3,seq_max_k2,seq_max_k3"
)
BOUNDS = {"k1": (0.6, 1.9), "k2": 0.3, "k3": 0.25}


def bounded_exp(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def divergence(estimator: str, d: float) -> float:
    assert abs(d) <= 20.0
    return {"k1": -d, "k2": d * d / 2.0, "k3": math.expm1(d) - d}[estimator]


def reference(target, rollout, mask, level, threshold, modes, bounds, scale=1.0, veto=None):
    """Weights, keep and metrics, sample by sample."""
    weights, keep, sample_rows, term_weights, raw_weights = [], [], [], [], []
    reductions = {"seq_sum": sum, "seq_mean": statistics.fmean, "seq_max": max}
    for t_row, r_row, m_row in zip(target.tolist(), rollout.tolist(), mask.tolist(), strict=True):
        valid = [
            bool(m) and math.isfinite(t) and math.isfinite(r)
            for t, r, m in zip(t_row, r_row, m_row, strict=True)
        ]
        delta = [t - r if v else 0.0 for t, r, v in zip(t_row, r_row, valid, strict=True)]
        used = [d for d, v in zip(delta, valid, strict=True) if v]
        scaled = [scale * d for d in used]
        exponent = {"sequence": sum(scaled), "geometric": sum(scaled) / max(len(scaled), 1), "token": 0.0}[
            level
        ]
        row_weights = []
        for d, v in zip(delta, valid, strict=True):
            raw = bounded_exp(scale * d if level == "token" else exponent)
            if isinstance(threshold, tuple):
                weight = raw if threshold[0] <= raw <= threshold[1] else 0.0
            else:
                weight = min(raw, threshold)
            row_weights.append(weight if v else 0.0)
            if v:
                term_weights.append(weight)
                raw_weights.append(raw)
        weights.append(row_weights)
        row_keep = list(valid)
        spoilt = any(m and not v for m, v in zip(m_row, valid, strict=True)) and (
            level != "token" or any(mode.startswith("seq") for mode in modes)
        )
        for mode, bound in zip(modes, bounds, strict=True):
            kind, _, estimator = mode.rpartition("_")
            lower, upper = bound if isinstance(bound, tuple) else (0.0, bound)
            if kind == "token":
                for t, d in enumerate(delta):
                    value = math.exp(scale * d) if estimator == "k1" else divergence(estimator, scale * d)
                    row_keep[t] = row_keep[t] and lower <= value <= upper
            elif scaled:
                value = reductions[kind]([divergence(estimator, d) for d in scaled])
                value = math.exp(-value) if estimator == "k1" else value
                spoilt = spoilt or not lower <= value <= upper
        if veto is not None:
            spoilt = spoilt or any(d < math.log(veto) for d in scaled)
        keep.append([k and not spoilt for k in row_keep])
        if used:
            rolled = [r for r, v in zip(r_row, valid, strict=True) if v]
            sample_rows.append((used, rolled))
    terms = [d for used, _ in sample_rows for d in used]
    nll = [
        (-statistics.fmean([d + r for d, r in zip(u, q, strict=True)]), -statistics.fmean(q))
        for u, q in sample_rows
    ]
    k1 = [-statistics.fmean(used) for used, _ in sample_rows]
    on = sum(bool(m) for row in mask.tolist() for m in row)
    metrics = {
        "kl": -statistics.fmean(terms),
        "k3_kl": statistics.fmean(divergence("k3", d) for d in terms),
        "logprob_abs_diff_mean": statistics.fmean(abs(d) for d in terms),
        "logprob_abs_diff_max": max(abs(d) for d in terms),
        "chi2_token": statistics.fmean(bounded_exp(d) ** 2 - 1 for d in terms),
        "chi2_seq": statistics.fmean(bounded_exp(sum(used)) ** 2 - 1 for used, _ in sample_rows),
        "log_ppl_diff": statistics.fmean(k1),
        "log_ppl_abs_diff": statistics.fmean(abs(x) for x in k1),
        "log_ppl_diff_max": max(k1),
        "log_ppl_diff_min": min(k1),
        "ppl_ratio": statistics.fmean(math.exp(x) for x in k1),
        "training_ppl": statistics.fmean(math.exp(t) for t, _ in nll),
        "training_log_ppl": statistics.fmean(t for t, _ in nll),
        "rollout_ppl": statistics.fmean(math.exp(r) for _, r in nll),
        "rollout_log_ppl": statistics.fmean(r for _, r in nll),
        "nonfinite_fraction": 1.0 - len(terms) / on,
        "rollout_is_mean": statistics.fmean(term_weights),
        "rollout_is_std": statistics.stdev(term_weights),
        "rollout_is_max": max(term_weights),
        "rollout_is_min": min(term_weights),
        "rollout_is_raw_max": max(raw_weights),
        "rollout_is_raw_min": min(raw_weights),
        "rollout_is_eff_sample_size": sum(term_weights) ** 2
        / len(term_weights)
        / sum(w * w for w in term_weights),
        "rollout_rs_masked_fraction": 1.0 - sum(map(sum, keep)) / on,
    }
    return weights, keep, {f"rollout_corr/{name}": value for name, value in metrics.items()}


@pytest.fixture(params=[0, 1, 2])
def batch(request):
    """Log-probs `[24, 4]` with a ragged mask, a sample that is masked off, and non-finite values."""
    generator = torch.Generator().manual_seed(request.param)
    rollout = torch.randn(24, 4, generator=generator)
    target = rollout + 0.4 * torch.randn(24, 4, generator=generator)
    mask = torch.rand(24, 4, generator=generator) > 0.2
    mask[3] = False
    mask[4:6] = True
    target[4, 1], rollout[5, 2], target[6, 0] = math.nan, -math.inf, math.inf
    return target, rollout, mask


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("threshold", [1.3, (0.7, 1.4), math.inf])
@pytest.mark.parametrize("mode", [None, *RS_CHAIN.split(","), RS_CHAIN])
def test_agrees_with_the_sample_by_sample_reference(batch, level, threshold, mode):
    modes = mode.split(",") if mode else []
    bounds = [BOUNDS[name[-2:]] for name in modes]
    written = ",".join(f"{b[0]}_{b[1]}" if isinstance(b, tuple) else str(b) for b in bounds) or None
    result = correct(
        *batch,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_rs=mode,
        rollout_rs_threshold=written,
        rollout_token_veto_threshold=0.35,
        log_ratio_scale=1.25,
    )
    weights, keep, metrics = reference(*batch, level, threshold, modes, bounds, scale=1.25, veto=0.35)
    assert result.keep.tolist() == keep
    assert result.weights.dtype == torch.float32
    torch.testing.assert_close(result.weights, torch.tensor(weights), rtol=1e-6, atol=1e-7)
    computed = result.metrics.compute()
    assert {name: computed[name] for name in metrics} == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_hand_computed_values():
    delta = torch.tensor([[math.log(2.0), math.log(0.5)], [math.log(4.0), 0.0]], dtype=torch.float64)
    result = correct(delta, torch.zeros_like(delta), rollout_is="sequence", rollout_is_threshold=2.0)
    assert result.weights.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    values = result.metrics.compute()
    assert values["rollout_corr/kl"] == pytest.approx(-math.log(4.0) / 4)
    assert values["rollout_corr/k3_kl"] == pytest.approx((1 - 0.5 + 3 - math.log(4.0)) / 4)
    assert values["rollout_corr/chi2_token"] == pytest.approx((4 + 0.25 + 16 + 1) / 4 - 1)
    assert values["rollout_corr/chi2_seq"] == pytest.approx((1 + 16) / 2 - 1)
    assert values["rollout_corr/rollout_is_raw_max"] == pytest.approx(4.0)
    assert values["rollout_corr/rollout_is_mean"] == pytest.approx(1.5)
    assert values["rollout_corr/rollout_is_std"] == pytest.approx(math.sqrt(1 / 3))
    assert values["rollout_corr/rollout_is_seq_std"] == pytest.approx(math.sqrt(0.5))
    assert values["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(36 / (4 * 10))
    assert values["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    assert values["rollout_corr/rollout_is_seq_max_deviation"] == pytest.approx(1.0)
    assert values["rollout_corr/rejected_ratio"] == 0.0


@given(
    cuts=st.lists(st.integers(1, 39), max_size=5),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    num_steps=st.sampled_from([6, None]),
)
@settings(max_examples=25, deadline=None)
def test_any_cut_into_micro_batches_merges_to_the_same_metrics(cuts, level, num_steps):
    generator = torch.Generator().manual_seed(7)
    rollout = torch.randn(40, 3, generator=generator)
    target = rollout + 1e-4 * torch.randn(40, 3, generator=generator)
    target[11, 1] = math.nan
    tensors = {
        "step_kl": 1e-8 * torch.rand(40, 3, generator=generator),
        "step_indices": torch.randint(0, 5, (40, 3), generator=generator),
    }
    options = {
        "rollout_is": level,
        "rollout_rs": "token_k2,seq_mean_k1,step_kl",
        "rollout_rs_threshold": "1e-8,0.99995_1.00002,7e-9",
        "rollout_token_veto_threshold": 0.9998,
        "num_elements": 512,
        "num_steps": num_steps,
        "clip_ratio": 1e-4,
    }
    whole = correct(target, rollout, **tensors, **options)
    edges = [0, *sorted(set(cuts)), 40]
    parts = [
        correct(target[a:b], rollout[a:b], **{name: x[a:b] for name, x in tensors.items()}, **options)
        for a, b in itertools.pairwise(edges)
    ]
    merged = Metrics.merged(part.metrics for part in parts).compute()
    assert merged == pytest.approx(whole.metrics.compute(), rel=1e-9, abs=1e-15)
    assert torch.equal(torch.cat([part.keep for part in parts]), whole.keep)
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights)


def test_large_batches_are_cut_without_a_trace():
    generator = torch.Generator().manual_seed(1)
    rollout = torch.randn(100_000, 2, generator=generator)
    target = rollout + 1e-3 * torch.randn(100_000, 2, generator=generator)
    options = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    whole = correct(target, rollout, **options)
    halves = [
        correct(target[part], rollout[part], **options) for part in (slice(0, 50_000), slice(50_000, None))
    ]
    assert whole.keep.shape == (100_000, 2)
    assert torch.equal(whole.weights, torch.cat([half.weights for half in halves]))
    merged = Metrics.merged(half.metrics for half in halves).compute()
    assert whole.metrics.compute() == pytest.approx(merged, rel=1e-9)


@given(seed=st.integers(0, 2**31), level=st.sampled_from(["token", "sequence", "geometric"]))
@settings(max_examples=20, deadline=None)
def test_order_of_samples_does_not_matter(seed, level):
    generator = torch.Generator().manual_seed(seed)
    rollout = torch.randn(16, 3, generator=generator)
    target = rollout + 0.3 * torch.randn(16, 3, generator=generator)
    order = torch.randperm(16, generator=generator)
    options = {"rollout_is": level, "rollout_rs": RS_CHAIN, "rollout_rs_threshold": 1.8}
    plain, shuffled = correct(target, rollout, **options), correct(target[order], rollout[order], **options)
    assert torch.equal(plain.keep[order], shuffled.keep)
    torch.testing.assert_close(plain.weights[order], shuffled.weights)
    assert shuffled.metrics.compute() == pytest.approx(plain.metrics.compute(), rel=1e-9, abs=1e-15)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=6, max_size=6),
    st.floats(1.001, 5.0),
    st.floats(1.0, 3.0),
    st.sampled_from(RS_CHAIN.split(",")),
)
@settings(max_examples=60, deadline=None)
def test_a_wider_band_keeps_more(deltas, threshold, factor, mode):
    delta = torch.tensor(deltas).view(3, 2)
    narrow, wide = (
        correct(delta, torch.zeros_like(delta), rollout_rs=mode, rollout_rs_threshold=bound).keep
        for bound in (threshold, threshold * factor)
    )
    assert bool((wide | ~narrow).all())


@given(
    st.lists(st.floats(-40, 40, width=32), min_size=6, max_size=6),
    st.sampled_from([None, *RS_CHAIN.split(",")]),
)
@settings(max_examples=40, deadline=None)
def test_rejection_never_changes_weights_and_weights_are_bounded(deltas, mode):
    delta = torch.tensor(deltas).view(3, 2)
    plain = correct(delta, torch.zeros_like(delta), rollout_is="token", rollout_is_threshold=math.inf)
    rejecting = correct(
        delta,
        torch.zeros_like(delta),
        rollout_is="token",
        rollout_is_threshold=math.inf,
        rollout_rs=mode,
        rollout_rs_threshold=1.01,
        rollout_token_veto_threshold=0.9,
    )
    assert torch.equal(plain.weights, rejecting.weights)
    assert float(plain.weights.min()) >= math.exp(-20) * (1 - 1e-6)
    assert float(plain.weights.max()) <= math.exp(20) * (1 + 1e-6)


@pytest.mark.parametrize("mode", [*RS_CHAIN.split(","), "step_z"])
@pytest.mark.parametrize("scale", ["mean", "sqrt", "sum"])
def test_equal_policies_are_never_touched(mode, scale):
    log_prob = torch.randn(10, 2)
    result = correct(
        log_prob,
        log_prob,
        rollout_is="sequence",
        rollout_rs=mode,
        rollout_rs_threshold=1.0001,
        rollout_token_veto_threshold=0.999,
        log_ratio_scale=scale,
        num_elements=4096,
    )
    assert bool(result.keep.all())
    assert torch.equal(result.weights, torch.ones(10, 2))
    assert result.metrics.compute()["rollout_corr/rollout_is_eff_sample_size"] == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_non_finite_step_reaches_nothing(bad, level):
    rollout = torch.zeros(3, 2)
    target = torch.full((3, 2), 0.01)
    target[1, 0] = bad
    for a, b in ((target, rollout), (rollout, target)):
        result = correct(a, b, rollout_is=level, rollout_rs="token_k1", rollout_rs_threshold=2.0)
        sample = level == "token"
        assert result.keep.tolist() == [[True, True], [False, sample], [True, True]]
        assert bool(result.weights.isfinite().all())
        assert result.weights[1, 0] == 0.0
        values = result.metrics.compute()
        assert all(math.isfinite(value) for value in values.values())
        assert values["rollout_corr/nonfinite_fraction"] == pytest.approx(1 / 6)
        assert values["rollout_corr/rejected_ratio"] == pytest.approx(1 / 3)


def test_a_batch_without_a_finite_term_is_rejected_and_says_so():
    bad = torch.full((2, 2), math.nan)
    result = correct(
        bad, torch.zeros(2, 2), rollout_is="sequence", rollout_rs="token", rollout_rs_threshold=2.0
    )
    values = result.metrics.compute()
    assert not bool(result.keep.any())
    assert values["rollout_corr/nonfinite_fraction"] == values["rollout_corr/rejected_ratio"] == 1.0
    assert all(math.isfinite(value) for value in values.values())
    assert "rollout_corr/kl" not in values
    assert "rollout_corr/logprob_abs_diff_max" not in values


def test_no_gradient_flows_and_inputs_are_left_alone():
    target = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    rollout = torch.randn(4, 2, dtype=torch.float64)
    rollout[0, 0] = math.nan
    copies = target.detach().clone(), rollout.clone()
    result = correct(target, rollout, rollout_is="token")
    assert not result.weights.requires_grad
    assert torch.equal(target.detach(), copies[0])
    torch.testing.assert_close(rollout, copies[1], equal_nan=True, rtol=0, atol=0)


def test_icepop_zeros_are_kept():
    delta = torch.tensor([[1.0, 0.0]])
    result = correct(delta, torch.zeros(1, 2), rollout_is="token", rollout_is_threshold="0.5_2")
    assert result.weights.tolist() == [[0.0, 1.0]]
    assert result.keep.tolist() == [[True, True]]
    assert result.metrics.compute()["rollout_corr/rollout_is_oob_ratio"] == 0.5


def test_weights_that_are_not_applied_only_reach_the_metrics():
    delta = torch.tensor([[1.0, math.nan]])
    result = correct(delta, torch.zeros(1, 2), rollout_is="sequence", rollout_is_apply=False)
    assert result.weights is None
    assert result.keep.tolist() == [[True, False]]
    assert result.metrics.compute()["rollout_corr/rollout_is_raw_max"] == pytest.approx(math.e)


def test_asymmetric_k1_bands_bound_the_ratio_and_not_its_reciprocal():
    ratio = torch.tensor([[0.6], [1.7], [2.5]])
    result = correct(ratio.log(), torch.zeros(3, 1), rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    assert result.keep.flatten().tolist() == [True, True, False]
    skewed = correct(ratio.log(), torch.zeros(3, 1), rollout_rs="token_k1", rollout_rs_threshold="0.55_3.0")
    # verl holds k1 = -log ratio against log(0.55)..log(3), so it would keep ratios in 0.33..1.82 only.
    assert skewed.keep.flatten().tolist() == [True, True, True]
    values = skewed.metrics.compute()
    assert values["rollout_corr/rollout_rs_token_k1_max"] == pytest.approx(-math.log(0.6), rel=1e-6)


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


def test_veto_rejects_the_sample_by_the_unbounded_ratio():
    delta = torch.tensor([[0.0, -30.0], [0.0, -0.1]])
    result = correct(delta, torch.zeros(2, 2), rollout_token_veto_threshold=1e-10)
    assert result.keep.tolist() == [[False, False], [True, True]]
    values = result.metrics.compute()
    assert values["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert values["rollout_corr/rollout_is_catastrophic_token_fraction"] == 0.25


@pytest.mark.parametrize(("level", "expected"), [("token", [[0.5, 1.5], [1.0, 1.0]]), ("sequence", None)])
def test_batch_normalisation_gives_a_mean_of_one(level, expected):
    ratio = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    mask = torch.tensor([[1, 1], [1, 1]])
    result = correct(
        ratio.log(),
        torch.zeros(2, 2),
        mask,
        rollout_is=level,
        rollout_is_threshold=3.5,
        rollout_is_batch_normalize=True,
    )
    if expected is not None:
        torch.testing.assert_close(result.weights, torch.tensor(expected))
    assert float(result.weights.mean()) == pytest.approx(1.0)
    factor = result.metrics.compute()["rollout_corr/rollout_is_batch_norm_factor"]
    assert factor == pytest.approx({"token": 2.0, "sequence": 3.25}[level])


def test_batch_normalisation_of_vanishing_weights_leaves_them():
    delta = torch.full((2, 2), 3.0)
    result = correct(
        delta,
        torch.zeros(2, 2),
        rollout_is="token",
        rollout_is_threshold=(0.5, 2.0),
        rollout_is_batch_normalize=True,
    )
    assert torch.equal(result.weights, torch.zeros(2, 2))


def test_scale_sum_is_the_density_ratio_of_normal_distributions():
    torch.manual_seed(0)
    num_elements, std = 64, 0.3
    mean_a = torch.randn(5, num_elements, dtype=torch.float64)
    mean_b = mean_a + 0.02 * torch.randn(5, num_elements, dtype=torch.float64)
    sample = mean_b + std * torch.randn(5, num_elements, dtype=torch.float64)
    log_a = torch.distributions.Normal(mean_a, std).log_prob(sample)
    log_b = torch.distributions.Normal(mean_b, std).log_prob(sample)
    result = correct(
        log_a.mean(1, keepdim=True),
        log_b.mean(1, keepdim=True),
        rollout_is="token",
        rollout_is_threshold=math.inf,
        log_ratio_scale="sum",
        num_elements=num_elements,
    )
    density_ratio = (log_a - log_b).sum(1, keepdim=True).exp()
    torch.testing.assert_close(result.weights.double(), density_ratio, rtol=1e-6, atol=0)


def test_delta_follows_its_analytic_distribution_and_the_bookkeeping_check_accepts_it():
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


def test_exact_kl_modes_bound_the_step_and_the_window():
    kl = torch.tensor([[1e-4, 3e-4], [1e-4, 1e-4]])
    zero = torch.zeros(2, 2)
    step = correct(zero, zero, step_kl=kl, rollout_rs="step_kl", rollout_rs_threshold=2e-4)
    assert step.keep.tolist() == [[True, False], [True, True]]
    window = correct(zero, zero, step_kl=kl, rollout_rs="seq_kl", rollout_rs_threshold=3e-4)
    assert window.keep.tolist() == [[False, False], [True, True]]
    assert step.metrics.compute()["rollout_corr/exact_kl"] == pytest.approx(1.5e-4)
    with pytest.raises(BatchError, match="step_kl"):
        correct(zero, zero, rollout_rs="seq_kl", rollout_rs_threshold=1e-3)


def test_step_z_finds_the_outlier_of_its_step_index():
    generator = torch.Generator().manual_seed(5)
    indices = torch.tensor([[0, 1]]).repeat(12, 1)
    delta = torch.where(indices == 0, 1e-3, 1e-1) * torch.randn(
        12, 2, generator=generator, dtype=torch.float64
    )
    delta[7, 0] = 0.05  # ordinary for step 1, far out for step 0
    result = correct(
        delta,
        torch.zeros_like(delta),
        rollout_rs="step_z",
        rollout_rs_threshold=6.0,
        step_indices=indices,
        num_steps=3,
        num_elements=10**6,
    )
    expected = torch.ones(12, 2, dtype=torch.bool)
    expected[7, 0] = False
    assert torch.equal(result.keep, expected)
    column = delta[:, 0].tolist()
    median = statistics.median(column)
    mad = statistics.median(abs(x - median) for x in column)
    z = result.metrics.compute()["rollout_corr/rollout_rs_step_z_max"]
    floor = 4 * 2.0**-28  # 4 float32 ulps of 0.05, which is more than 0.01 / D
    assert z == pytest.approx((0.05 - median) / (1.4826 * mad + floor), rel=1e-9)


def test_step_z_needs_eight_terms_and_is_blind_to_a_shift():
    delta = torch.zeros(8, 1, dtype=torch.float64)
    delta[0] = 1.0
    options = {"rollout_rs": "step_z", "rollout_rs_threshold": 6.0}
    assert bool(correct(delta[:7], torch.zeros(7, 1), **options).keep.all())
    assert not bool(correct(delta, torch.zeros(8, 1), **options).keep[0])
    assert bool(correct(torch.full((9, 1), 0.5), torch.zeros(9, 1), **options).keep.all())


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


def test_rows_merge_whichever_step_indices_the_parts_hold():
    delta = torch.tensor([[0.1, -0.3], [0.2, 0.4], [0.5, -0.7]], dtype=torch.float64)
    indices = torch.tensor([[0, 1], [1, 5], [0, 2]])

    def found(rows, **options):
        part = correct(delta[rows], torch.zeros_like(delta[rows]), rollout_is="token", **options)
        return part.metrics

    whole = found(slice(None), step_indices=indices, num_steps=7).compute()
    parts = [found([row], step_indices=indices[[row]]) for row in (2, 0, 1)]
    assert Metrics.merged(parts).compute() == pytest.approx(whole, rel=1e-12)
    rows = {name.split("/")[1] for name in whole if "/step_" in name}
    assert rows == {f"step_{index}" for index in (0, 1, 2, 5)}
    # The rows are beside everything else, which merges with parts that have none.
    mixed = parts[0].merge(found([0])).merge(found([1])).compute()
    assert mixed["rollout_corr/kl"] == pytest.approx(whole["rollout_corr/kl"])
    assert mixed["rollout_corr/step_2/kl"] == pytest.approx(0.7)


@pytest.mark.parametrize("clip", [1e-3, torch.tensor([[1e-3, 1e-3], [1e-3, 1e-1]])])
def test_clip_noise_fraction(clip):
    delta = torch.tensor([[5e-4, -2e-3], [9.9e-4, 2e-3]], dtype=torch.float64)
    values = correct(delta, torch.zeros_like(delta), clip_ratio=clip).metrics.compute()
    assert values["rollout_corr/clip_noise_fraction"] == (0.25 if isinstance(clip, torch.Tensor) else 0.5)


def test_legacy_names_are_added_on_request():
    delta = torch.tensor([[0.1, 0.2]])
    values = correct(delta, torch.zeros(1, 2), rollout_is="token", log_legacy_names=True).metrics.compute()
    assert values["mismatch/mismatch_kl"] == values["rollout_corr/kl"]
    assert values["mismatch/rollout_is_mean"] == values["rollout_corr/rollout_is_mean"]
    assert values["mismatch/rollout_is_masked_fraction"] == values["rollout_corr/rollout_rs_masked_fraction"]
    plain = correct(delta, torch.zeros(1, 2), rollout_is="token").metrics.compute()
    assert not any(name.startswith("mismatch/") for name in plain)
    assert set(plain) <= set(values)


def test_tiny_ratios_keep_their_digits():
    delta = torch.full((1000, 1), 1e-7, dtype=torch.float64)
    values = correct(delta, torch.zeros_like(delta), rollout_is="token").metrics.compute()
    assert values["rollout_corr/k3_kl"] == pytest.approx(5e-15, rel=1e-6)
    assert values["rollout_corr/chi2_token"] == pytest.approx(2e-7, rel=1e-6)
    assert values["rollout_corr/rollout_is_mean"] - 1.0 == pytest.approx(1e-7, rel=1e-6)


@pytest.mark.parametrize("exponent", [-25.0, -16.0, 0.0])
def test_effective_sample_size_of_small_weights(exponent):
    delta = exponent + torch.tensor([[0.0], [0.1], [0.3]], dtype=torch.float64)
    weights = delta.clamp(min=-20.0).exp().flatten().tolist()
    values = correct(delta, torch.zeros_like(delta), rollout_is="token").metrics.compute()
    share = sum(weights) ** 2 / (3 * sum(weight**2 for weight in weights))
    assert values["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(share, rel=1e-12)
    assert values["rollout_corr/rollout_is_std"] == pytest.approx(statistics.stdev(weights), rel=1e-9)


@pytest.mark.parametrize("mode", ["token_k3", "seq_sum_k3", "seq_mean_k3", "seq_max_k3"])
@pytest.mark.parametrize("delta", [10_000.0, -10_000.0])
def test_the_worst_terms_have_the_largest_divergence(mode, delta):
    options = {"log_ratio_scale": "sum", "num_elements": 65536}
    target = torch.tensor([[delta], [1e-7]], dtype=torch.float64)
    result = correct(target, torch.zeros(2, 1), rollout_rs=mode, rollout_rs_threshold=0.01, **options)
    assert result.keep.tolist() == [[False], [True]]
    values = result.metrics.compute()
    assert values[f"rollout_corr/rollout_rs_{mode}_min"] >= 0.0
    assert values[f"rollout_corr/rollout_rs_{mode}_max"] > 1e8


@pytest.mark.parametrize("mode", ["token_k2", "token_k3", "seq_sum_k2", "seq_mean_k3", "step_kl", "seq_kl"])
def test_measured_bounds_keep_all_of_a_few_terms(mode):
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        delta, kl = torch.randn(2, 5, 2, generator=draw, dtype=torch.float64)
        options = {"step_kl": kl.square(), "rollout_rs": mode, "rollout_rs_threshold": "auto"}
        assert bool(correct(delta, torch.zeros_like(delta), **options).keep.all()), seed


def test_a_mode_of_ones_own():
    # The sum of the steps but the first, as an upper bound.
    options = {"rollout_rs": f"{__name__}:LATER_STEPS,token_k1", "rollout_rs_threshold": "0.5,0.1_10"}
    delta = torch.tensor([[0.9, 0.1, 0.3], [0.1, 0.3, 0.3]])
    result = correct(delta, torch.zeros_like(delta), **options)
    assert result.keep.tolist() == [[True] * 3, [False] * 3]
    values = result.metrics.compute()
    assert values["rollout_corr/rollout_rs_LATER_STEPS_max"] == pytest.approx(0.6)
    assert values["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 0.0
    with pytest.raises(ConfigError, match=r"is of type dict; name a flowcorr\.correction\.Mode"):
        correct(delta, delta, rollout_rs=f"{__name__}:BOUNDS", rollout_rs_threshold=1.0)


LATER_STEPS = Mode(level="sample", value=lambda ratios: ratios.scaled.sum(1) - ratios.scaled[:, 0])


def test_legacy_fractions_count_against_the_band_of_mode_mask():
    delta = torch.tensor([[1.0, 2.5], [0.4, 1.0]]).log()
    options = {"rollout_is": "token", "rollout_is_threshold": math.inf, "log_legacy_names": True}
    mask = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    values = correct(delta, torch.zeros_like(delta), **options, **mask).metrics.compute()
    assert values["mismatch/rollout_is_ratio_fraction_high"] == 0.25
    assert values["mismatch/rollout_is_ratio_fraction_low"] == 0.25
    assert values["mismatch/rollout_is_seq_fraction_high"] == 0.0
    assert values["rollout_corr/rollout_is_ratio_fraction_high"] == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask", torch.ones(4, 1)),
        ("mask", torch.ones(2)),
        ("step_kl", torch.ones(1, 2)),
        ("step_indices", torch.ones(2, 4, dtype=torch.long)),
        ("clip_ratio", torch.ones(4, 1)),
    ],
)
def test_nothing_is_broadcast(name, value):
    with pytest.raises(BatchError, match=rf"{name} has shape.*nothing is broadcast"):
        correct(torch.zeros(4, 2), torch.zeros(4, 2), **{name: value})


@pytest.mark.parametrize("shape", [(4, 1), (1, 2), (2, 4), (8,)])
def test_log_probs_of_other_shapes_are_refused(shape):
    with pytest.raises(BatchError, match="rollout_log_prob has shape"):
        correct(torch.zeros(4, 2), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(4,), (0, 2), (4, 0), (2, 2, 2)])
def test_batches_that_are_no_matrix_of_terms_are_refused(shape):
    with pytest.raises(BatchError, match=r"must be \[B, T\]"):
        correct(torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "did you mean token"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "rollout_is_threshold is null"),
        ({"rollout_is": "token", "rollout_is_threshold": "2.0_0.5"}, "write 0.5_2"),
        ({"rollout_rs": "seq_mean_k1"}, "rollout_rs_threshold is missing"),
        ({"rollout_rs": "seq_mean_k4", "rollout_rs_threshold": 1.0}, "did you mean seq_mean_k3"),
        ({"rollout_token_veto_threshold": 1.5}, "between 0 and 1"),
        ({"log_ratio_scale": "some"}, "log_ratio_scale"),
    ],
)
def test_bad_choices_name_their_key(options, message):
    with pytest.raises(ConfigError, match=message):
        correct(torch.zeros(1, 1), torch.zeros(1, 1), **options)


def test_scale_by_elements_needs_their_number():
    with pytest.raises(BatchError, match="num_elements"):
        correct(torch.zeros(1, 1), torch.zeros(1, 1), log_ratio_scale="sum")


# Ranks ----------------------------------------------------------------------------------------------------

RANK_BOUNDS = {
    "one has none": (slice(0, 0), slice(0, 48)),
    "each has its own steps": (slice(0, 24), slice(24, 48)),
}


def of_rank(part):
    """A correction of samples whose second half is at later and noisier steps, without the schedule's length."""
    draw = torch.Generator().manual_seed(3)
    indices = torch.tensor([[0, 1], [2, 3]]).repeat_interleave(24, 0)
    delta = 1e-3 * 4.0**indices * torch.randn(48, 2, dtype=torch.float64, generator=draw)
    delta[7, 0] = 0.1  # an outlier among its step's terms, and none of the batch
    return correct(
        delta[part],
        torch.zeros_like(delta[part]),
        rollout_rs="token_k1",
        rollout_rs_threshold="auto",
        step_indices=indices[part],
    )


def test_ranks_may_hold_different_steps_and_no_samples(two_ranks):
    whole = of_rank(slice(None))
    assert bool(whole.keep.all())
    for rank, found in enumerate(two_ranks.call(of_this_rank)):
        for case, (keep, values) in found.items():
            assert torch.equal(keep, whole.keep[RANK_BOUNDS[case][rank]]), case
            assert values == pytest.approx(whole.metrics.compute(), rel=1e-9), case


def of_this_rank():
    found = {case: of_rank(parts[distributed.rank()]) for case, parts in RANK_BOUNDS.items()}
    return {case: (part.keep, part.metrics.across_ranks().compute()) for case, part in found.items()}
