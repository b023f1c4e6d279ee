"""The correction against a plain-Python float64 reference, and the properties it must have."""

from __future__ import annotations

import itertools
import math
import re
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr import distributed
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
    }
    whole = correct(target, rollout, **tensors, **options)
    edges = [0, *sorted(set(cuts)), 40]
    parts = [
        correct(target[a:b], rollout[a:b], **{name: x[a:b] for name, x in tensors.items()}, **options)
        for a, b in itertools.pairwise(edges)
    ]
    merged = Metrics(*(part.metrics for part in parts)).compute()
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
    merged = Metrics(*(half.metrics for half in halves)).compute()
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


def test_no_gradient_flows_and_inputs_are_left_alone():
    target = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    rollout = torch.randn(4, 2, dtype=torch.float64)
    rollout[0, 0] = math.nan
    copies = target.detach().clone(), rollout.clone()
    result = correct(target, rollout, rollout_is="token")
    assert not result.weights.requires_grad
    assert torch.equal(target.detach(), copies[0])
    torch.testing.assert_close(rollout, copies[1], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("mask", torch.ones(4, 1), r"\[4, 1\]"),
        ("mask", torch.ones(2), r"\[2\]"),
        ("step_kl", torch.ones(1, 2), r"\[1, 2\]"),
        ("step_indices", torch.ones(2, 4, dtype=torch.long), r"\[2, 4\]"),
        ("rollout_log_prob", torch.zeros(4, 1), r"\[4, 1\]"),
        ("rollout_log_prob", torch.zeros(1, 2), r"\[1, 2\]"),
        ("rollout_log_prob", torch.zeros(2, 4), r"\[2, 4\]"),
        ("rollout_log_prob", torch.zeros(8), r"\[8\]"),
        ("rollout_log_prob", torch.zeros(4, 2).numpy(), "ndarray"),
    ],
)
def test_nothing_is_broadcast_or_converted(name, value, named):
    terms = {"target_log_prob": torch.zeros(4, 2), "rollout_log_prob": torch.zeros(4, 2), name: value}
    with pytest.raises(BatchError, match=rf"^{name} .* {named}; .*\[4, 2\]"):
        correct(**terms)


@pytest.mark.parametrize("shape", [(4,), (0, 2), (4, 0), (2, 2, 2)])
def test_batches_that_are_no_matrix_of_terms_are_refused(shape):
    with pytest.raises(BatchError, match=rf"^target_log_prob .*{re.escape(str(list(shape)))}; .*\[B, T\]"):
        correct(torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rollout_is": "tokens"}, r"rollout_is='tokens' .*token\?"),
        (
            {"rollout_rs": "seq_mean_k4", "rollout_rs_threshold": 1.0},
            r"rollout_rs='seq_mean_k4' .*seq_mean_k3\?",
        ),
        ({"rollout_token_veto_threshold": 1.5}, r"rollout_token_veto_threshold=1\.5 .* 0 and 1,"),
        ({"log_ratio_scale": "some"}, "log_ratio_scale='some' .* mean, sqrt, sum, "),
    ],
)
def test_bad_choices_name_their_key(options, named):
    with pytest.raises(ConfigError, match=rf"^algorithm\.rollout_correction\.{named}"):
        correct(torch.zeros(1, 1), torch.zeros(1, 1), **options)


@pytest.mark.parametrize(
    ("num_elements", "named"),
    [(None, "log_ratio_scale='sum' .*num_elements,"), (0, "num_elements=0 "), (-5, "num_elements=-5 ")],
)
def test_scale_by_elements_needs_their_number(num_elements, named):
    with pytest.raises(BatchError, match=f"^{named}"):
        correct(torch.zeros(1, 1), torch.zeros(1, 1), log_ratio_scale="sum", num_elements=num_elements)


@pytest.mark.parametrize(
    ("indices", "num_steps", "named"),
    [
        ([[5, 6], [6, 7]], 3, "5 to 7, .*num_steps=3;"),
        ([[-2, 1], [0, 1]], 4, "-2 to 1, .*num_steps=4;"),
        ([[-2, 1], [0, 1]], None, "-2 to 1, .*num_steps=2;"),
        ([[0.0, 1.0], [0.0, 1.0]], None, r"torch\.float32;"),
    ],
)
def test_indices_that_are_no_places_are_refused(indices, num_steps, named):
    values = torch.zeros(2, 2)
    with pytest.raises(BatchError, match=f"^step_indices .*{named}"):
        correct(values, values, step_indices=torch.tensor(indices), num_steps=num_steps)


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


@pytest.mark.parametrize("num_elements", [10**5, 10**6])
def test_the_latents_of_videos(num_elements):
    """A step whose means are `r` stds apart, by the model of the log-ratio; float32 log-probs near -1."""
    r = 1e-3
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(8192, 1, generator=draw, dtype=torch.float64)
    delta = -(r**2) / 2 + r / math.sqrt(num_elements) * noise
    options = {"rollout_is": "token", "rollout_is_threshold": math.inf, "num_elements": num_elements}
    by_scale = {
        scale: correct(delta, torch.zeros_like(delta), log_ratio_scale=scale, **options)
        for scale in ("mean", "sqrt", "sum")
    }
    assert by_scale["mean"].weights.sub(1).abs().max() < 1e-4  # whatever the gap
    assert by_scale["sqrt"].weights.log().std().item() == pytest.approx(r, rel=0.05)  # whatever D
    spread = by_scale["sum"].weights.log().std().item()
    assert spread == pytest.approx(r * math.sqrt(num_elements), rel=0.05)
    weights = by_scale["sum"].weights
    share = float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))  # effective samples of all
    assert share == pytest.approx(math.exp(-num_elements * r**2), rel=0.2)


@pytest.mark.parametrize("num_elements", [10**5, 10**6])
@pytest.mark.parametrize(("scale", "rejects"), [("mean", False), ("sqrt", False), ("sum", True)])
def test_a_usual_band_on_the_latents_of_videos(num_elements, scale, rejects):
    """Of 0.5 to 2: it acts on the density ratio of a step, and on no mean of it."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(4096, 1, generator=draw, dtype=torch.float64)
    r = 2 / math.sqrt(num_elements)
    delta = -(r**2) / 2 + r / math.sqrt(num_elements) * noise
    band = {"rollout_rs": "token_k1", "rollout_rs_threshold": (0.5, 2.0), "num_elements": num_elements}
    found = correct(delta, torch.zeros_like(delta), log_ratio_scale=scale, **band)
    assert bool((~found.keep).any()) == rejects
