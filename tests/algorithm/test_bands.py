"""Bands measured on earlier training steps: against a reference by hand, however the terms are split, and over time."""

import math
import shutil
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowcorr import trainer
from flowcorr.algorithm import MeasuredBands
from flowcorr.algorithm.apply import correct
from flowcorr.algorithm.bands import GAIN, MOST_MOVED, WARM_UP
from flowcorr.config.schema import ActorConfig
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.records import Terms
from flowcorr.trainer import checkpoint
from tests.conftest import small_config
from tests.trainer import runs

CLIP, SIZE, STEPS = 1e-3, 512, 4
ACTOR = ActorConfig(clip_ratio=CLIP)
STEP_MODES = "token_k1,token_k2,token_k3,step_kl,step_z"
SAMPLE_MODES = "seq_sum_k1,seq_sum_k2,seq_mean_k1,seq_mean_k3,seq_max_k2,seq_max_k3,seq_kl"


def bypass(modes="token_k1", scope="step", **keys):
    return RolloutCorrectionConfig(
        bypass_mode=True, bypass_scope=scope, rollout_rs=modes, rollout_rs_threshold="auto", **keys
    )


def terms_of(delta, index, kl=None):
    """Terms whose current log-probs are `delta` above the rollout's."""
    delta = torch.as_tensor(delta, dtype=torch.float64)
    rollout = torch.full_like(delta, -1.2)
    return Terms(
        log_prob=(rollout + delta).requires_grad_(),
        old_log_prob=rollout,
        rollout_log_prob=rollout,
        advantage=torch.ones_like(delta),
        std=torch.full_like(delta, 0.5),
        step=torch.full_like(delta, 0.1),
        step_index=torch.as_tensor(index).expand_as(delta).contiguous(),
        rollout_kl=SIZE * delta.square() / 2 if kl is None else kl,
        num_elements=SIZE,
    )


def bands_of(scope="step"):
    sampling = {"num_inference_steps": STEPS, "sde_window_size": 2, "sde_window_range": (0, 4)}
    level = "step" if scope == "step" else "trajectory_mean"
    config = small_config(sampling=sampling, actor={"clip_ratio": CLIP, "ratio_level": level})
    return MeasuredBands(
        config.actor,
        num_steps=config.sampling.num_inference_steps,
        window_size=config.sampling.sde_window_size,
    )


def observed(bands, correction, *parts):
    return bands.observe(correction, parts, SIZE).compute()


def drawn(seed, samples=32, spread=1e-4, windows=False):
    draw = torch.Generator().manual_seed(seed)
    first = torch.arange(samples) % 3
    index = torch.stack([first, first + 1], dim=1)
    delta = spread * 2.0**index * torch.randn(samples, 2, generator=draw, dtype=torch.float64)
    return terms_of(delta, index) if windows else terms_of(delta.flatten(), index.flatten())


def assert_equal(bands, others):
    assert bands.state().keys() == others.state().keys()
    for name, column in bands.state().items():
        assert torch.equal(column, others.state()[name]), name


def rejected(bands, correction, terms):
    kept, _ = correct(terms, correction, actor_config=ACTOR, num_steps=STEPS, noise=bands.noise)
    return ~kept.keep


# What is measured ---------------------------------------------------------------------------------------------


def test_by_hand():
    # Median 0, absolute deviations 1 1 1 1 3 3 3 3: 2 in the middle.
    values = [1e-4 * value for value in (-3, -3, -1, -1, 1, 1, 3, 3)]
    bands, correction = bands_of(), bypass()
    for step in range(WARM_UP):
        metrics = observed(bands, correction, terms_of(values, 1))
        assert metrics == {"rollout_corr/rollout_rs_unmeasured_fraction": 1.0}, step
    # Rounding: four ulps of a log-prob of about 1.2, or .01 / D, which is more.
    spread = 1.4826 * 2e-4 + 0.01 / SIZE
    noise = bands.noise["token_k1"]
    assert noise.centre[1] == pytest.approx(0.0, abs=1e-12)
    assert noise.spread[1] == pytest.approx(spread)
    assert noise.centre[[0, 2, 3]].isnan().all()
    metrics = observed(bands, correction, terms_of(values, 1))
    assert metrics == {
        "rollout_corr/rollout_rs_unmeasured_fraction": 0.0,
        "rollout_corr/step_1/rollout_rs_token_k1_threshold_low": pytest.approx(math.exp(-6 * spread)),
        "rollout_corr/step_1/rollout_rs_token_k1_threshold_high": pytest.approx(math.exp(6 * spread)),
    }
    edge = 6 * spread + math.log1p(CLIP)
    out = rejected(
        bands, correction, terms_of([0.999 * edge, 1.001 * edge, -0.999 * edge, -1.001 * edge, 1.0], 1)
    )
    assert out.tolist() == [False, True, False, True, True]
    assert not rejected(bands, correction, terms_of([1.0], 2)).any()  # of step 2 nothing is known


def reference(values):
    """Centre and spread without rounding, in Python's floats."""
    centre = statistics.median(values)
    return centre, 1.4826 * statistics.median(abs(value - centre) for value in values)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token_k1", lambda d: -d),
        ("token_k2", lambda d: (d * d / 2) ** (1 / 3)),
        ("token_k3", lambda d: math.log1p(math.expm1(d) - d) ** (1 / 3)),
        ("step_kl", lambda d: (SIZE * d * d / 2) ** (1 / 3)),
        ("step_z", lambda d: d),
    ],
)
@pytest.mark.parametrize("scale", ["mean", "sqrt", 7.0])
def test_noise_of_a_step_is_that_of_a_reference(mode, value, scale):
    terms = drawn(3, spread=1e-2)
    scaled = mode not in ("step_kl", "step_z")
    factor = {"mean": 1.0, "sqrt": math.sqrt(SIZE)}.get(scale, scale) if scaled else 1.0
    bands, correction = bands_of(), bypass(mode, log_ratio_scale=scale)
    for _ in range(WARM_UP):
        observed(bands, correction, terms)
    noise = bands.noise[mode]
    delta = terms.log_prob.detach() - terms.rollout_log_prob
    for step in range(STEPS):
        of_step = [value(factor * d) for d in delta[terms.step_index == step].tolist()]
        centre, spread = reference(of_step)
        assert noise.centre[step].item() == pytest.approx(centre, rel=1e-6, abs=1e-9)
        floor = value(factor * 0.01 / SIZE) / (SIZE ** (1 / 3) if mode == "step_kl" else 1)
        assert noise.spread[step].item() == pytest.approx(spread + abs(floor), rel=1e-5)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_no_split_changes_a_band(data):
    """Exactly: medians of the same terms."""
    windows = data.draw(st.booleans(), label="windows")
    scope = "trajectory" if windows else "step"
    correction = bypass(SAMPLE_MODES if windows else STEP_MODES, scope)
    whole, parts = bands_of(scope), bands_of(scope)
    for seed in range(WARM_UP + 2):
        terms = drawn(seed, windows=windows)
        observed(whole, correction, terms)
        count = terms.log_prob.shape[0]
        order = data.draw(st.permutations(range(count)), label="order")
        cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=5), label="cuts"))
        pieces = [
            terms.select(torch.tensor(order[a:b])) for a, b in zip([0, *cuts], [*cuts, count], strict=True)
        ]
        observed(parts, correction, *pieces)
    assert_equal(whole, parts)


# Over time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [STEP_MODES, "token_k1", "step_z"])
def test_clean_noise_is_kept_and_a_faulty_quarter_is_rejected_and_not_learned(modes):
    bands, correction = bands_of(), bypass(modes)
    for seed in range(60):
        terms = drawn(seed, samples=96)
        faulty = torch.arange(terms.log_prob.numel()) // 2 % 4 == 0  # both steps of a sample
        if seed >= 6:
            moved = terms.log_prob.detach() + torch.where(faulty, 20e-3, 0.0)
            terms = terms_of(moved - terms.rollout_log_prob, terms.step_index)
            assert torch.equal(rejected(bands, correction, terms), faulty), seed
        elif seed >= WARM_UP:
            assert not rejected(bands, correction, terms).any()
        observed(bands, correction, terms)


def test_noise_that_grows_slowly_is_followed():
    bands, correction = bands_of(), bypass()
    for seed in range(80):
        terms = drawn(seed, samples=96, spread=1e-4 * 1.04**seed)  # 22 times in all
        assert rejected(bands, correction, terms).double().mean() < 0.01, seed
        observed(bands, correction, terms)


def test_a_band_moves_by_a_tenth_of_its_half_width_at_most():
    bands, correction = bands_of(), bypass()
    for seed in range(WARM_UP):
        observed(bands, correction, drawn(seed, samples=96))
    before = bands.noise["token_k1"]
    half = 6 * before.spread + math.log1p(CLIP)
    far = drawn(9, samples=96, spread=1.0)
    observed(bands, correction, terms_of(far.log_prob.detach() - far.rollout_log_prob - 5.0, far.step_index))
    after = bands.noise["token_k1"]
    assert_close(after.centre - before.centre, MOST_MOVED * half, rtol=1e-9, atol=0)
    assert_close(6 * (after.spread - before.spread), MOST_MOVED * half, rtol=1e-9, atol=0)


@pytest.mark.parametrize("bad", range(WARM_UP))
@pytest.mark.parametrize("fault", ["shifted", "noisy"])
def test_one_bad_step_among_the_first_moves_no_band(fault, bad):
    bands, clean, correction = bands_of(), bands_of(), bypass(STEP_MODES)
    for seed in range(WARM_UP):
        terms = drawn(seed, samples=96)
        observed(clean, correction, terms)
        if seed == bad:
            delta = terms.log_prob.detach() - terms.rollout_log_prob
            terms = terms_of(delta + 0.02 if fault == "shifted" else 50 * delta, terms.step_index)
        observed(bands, correction, terms)
    for seed in range(10, 20):
        assert not rejected(bands, correction, drawn(seed, samples=96)).any()
    for mode, noise in bands.noise.items():
        assert_close(noise.spread, clean.noise[mode].spread, rtol=0.35, atol=0)


def test_a_band_moves_by_a_share_of_a_small_change():
    bands, correction = bands_of(), bypass()
    values = torch.tensor([-3.0, -3, -1, -1, 1, 1, 3, 3], dtype=torch.float64) * 1e-4
    for _ in range(WARM_UP):
        observed(bands, correction, terms_of(values, 0))
    observed(bands, correction, terms_of(values - 1e-4, 0))
    assert bands.noise["token_k1"].centre[0] == pytest.approx(GAIN * 1e-4, rel=1e-9)


def test_few_terms_of_a_step_measure_nothing():
    bands, correction = bands_of(), bypass()
    for _ in range(2 * WARM_UP):
        observed(bands, correction, terms_of([1e-4] * 7, 0))
    assert bands.noise["token_k1"].centre.isnan().all()


# In a run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "correction",
    [
        RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="auto"),
        RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=2.0),
    ],
    ids=["decoupled", "a fixed band"],
)
def test_nothing_is_measured_where_nothing_is_judged_by_it(correction):
    bands = bands_of()
    assert observed(bands, correction, drawn(0)) == {}
    assert bands.state() == {}


def test_state_goes_through_a_checkpoint():
    bands, again, correction = bands_of(), bands_of(), bypass("token_k1,step_z")
    for seed in range(WARM_UP):
        observed(bands, correction, drawn(seed))
    again.restore(bands.state())
    for one in (bands, again):
        observed(one, correction, drawn(7))
    assert_equal(bands, again)
    bands.restore({})
    assert bands.noise == {}


def test_learning_within_the_clip_range_is_not_rejected():
    """After the first updates of a training step ratios differ by what was learned, too."""
    bands, correction = bands_of(), bypass(STEP_MODES)
    for seed in range(WARM_UP):
        observed(bands, correction, drawn(seed, samples=96))
    terms = drawn(8, samples=96)
    learned = terms.log_prob.detach() + 0.99 * math.log1p(CLIP)
    kl = SIZE * (learned - terms.rollout_log_prob).square() / 2
    assert not rejected(
        bands, correction, terms_of(learned - terms.rollout_log_prob, terms.step_index, kl)
    ).any()


def test_a_loss_without_a_clip_range_adds_nothing():
    bands, correction = bands_of(), bypass(loss_type="reinforce")
    for seed in range(WARM_UP):
        observed(bands, correction, drawn(seed, samples=96))
    beyond = 6.5 * bands.noise["token_k1"].spread
    terms = terms_of(beyond, torch.arange(STEPS))
    assert rejected(bands, correction, terms).all()
    assert not rejected(bands, replace(correction, loss_type="ppo_clip"), terms).any()


KEYS = "{bypass_mode: true, rollout_rs: 'token_k1,step_z', rollout_rs_threshold: auto}"
RUN = (
    *("rollout.emulate=int4", "rollout.n=8", "sampling.sde_window_range=[0, 2]", "trainer.eval_every=0"),
    *("algorithm.rollout_correction=null", f"algorithm.rollout_correction={KEYS}"),
)


def test_a_resumed_run_is_an_uninterrupted_one(tmp_path):
    settings = runs.small_config(*RUN, "trainer.total_steps=5")
    torch.manual_seed(0)
    trainer.train(settings, whole := tmp_path / "whole")
    part = shutil.copytree(whole, tmp_path / "part")
    shutil.rmtree(part / "checkpoints" / "step_000005")
    trainer.train(settings, part, resume=True, observer=(recorder := runs.Recorder()))
    assert recorder.steps == [5]
    last, expected = (runs.records(folder)[5] for folder in (part, whole))
    assert last["rollout_corr/rollout_rs_unmeasured_fraction"] == 0
    assert last["rollout_corr/step_1/rollout_rs_token_k1_threshold_high"] > 1
    assert last == expected
    ours, theirs = (checkpoint.load_latest(folder / "checkpoints")[1].tensors for folder in (part, whole))
    assert {name for name in theirs if name.startswith("bands/")} == {
        f"bands/{mode}/{column}" for mode in ("token_k1", "step_z") for column in ("noise", "first", "count")
    }
    assert ours.keys() == theirs.keys()
    assert {name for name, value in ours.items() if not torch.equal(value, theirs[name])} == set()
