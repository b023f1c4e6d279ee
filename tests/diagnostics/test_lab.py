"""`flowcorr lab`: its numbers are those of training, and its coefficients those of autograd."""

import json
import math
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr import config, trainer
from flowcorr.correction import (
    PRESETS,
    RolloutCorrectionConfig,
    compute_rollout_correction_and_rejection_mask,
)
from flowcorr.diagnostics import lab, lab_replay
from flowcorr.diagnostics.lab import THIS_RUN, Outcome, Replay, parse_scales, read, replay_run
from flowcorr.diagnostics.lab_replay import obstacle, replay, stack
from flowcorr.errors import ConfigError
from flowcorr.losses import flow_dppo, flow_grpo, grpo_guard, reinforce
from flowcorr.trackers import read_metrics
from flowcorr.trainer import log_probs
from flowcorr.trainer.log_probs import LoggedTerms

SMALL = (
    "model.lora.rank=4",
    "sampling.num_inference_steps=4",
    "sampling.sde_window_range=[0, 3]",
    "rollout.prompts_per_step=2",
    "rollout.n=4",
    "rollout.emulate=int4",
    "actor.mini_batches=2",
    "data.num_train=4",
    "data.num_heldout=2",
    "trainer.dump_log_probs=true",
    "trainer.total_steps=2",
    "trainer.eval_every=0",
    "trainer.image_every=0",
)
CORRECTION = "algorithm.rollout_correction"
D = 64


def small_config(*overrides):
    return config.load("tiny_jpeg_lora", [*SMALL, *overrides])


def terms_of(samples=24, steps=2, *, seed=0, dtype=torch.float64, bypass=False, shift=1.0, kls=False):
    """Terms with a drift of some 1e-3 and updates of 5e-4 nats a latent element, in groups of four."""
    draw = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(samples, steps, generator=draw, dtype=dtype)

    rollout = noise(1.0)
    old = rollout if bypass else rollout + noise(shift * 1e-3)
    flat = torch.ones(samples, steps, dtype=dtype)
    optional = ("old_rollout_kl", "current_old_kl", "current_rollout_kl") if kls else ()
    return LoggedTerms(
        rollout_log_probs=rollout,
        old_log_probs=old,
        current_log_probs=old + noise(5e-4),
        advantages=torch.randn(samples, generator=draw, dtype=dtype),
        rewards=torch.rand(samples, generator=draw, dtype=dtype),
        timesteps=900 * flat,
        sigmas=0.9 * flat,
        sigmas_next=0.8 * flat,
        stds=0.3 * flat + 0.1 * torch.rand(samples, steps, generator=draw, dtype=dtype),
        step_indices=torch.arange(steps).repeat(samples, 1),
        group_ids=torch.arange(samples) // 4,
        policy_versions=torch.zeros(samples, dtype=torch.int64),
        num_elements=D,
        bypass=bypass,
        **{name: noise(1e-3).square() / 2 for name in optional},
    )


def write_run(folder, parts, *overrides):
    """A run's folder with these steps."""
    folder.mkdir()
    settings = config.load("tiny_jpeg_lora", list(overrides))
    (folder / "config.yaml").write_text(config.to_yaml(settings), encoding="utf-8")
    for step, part in enumerate(parts, 1):
        log_probs.save(folder / log_probs.FOLDER, step, part, settings)
    return folder


def by_label(report):
    return {found.label: found for found in report.replays}


# Against training ------------------------------------------------------------------------------------------------

BAND = f"{CORRECTION}.rollout_rs_threshold='0.992_1.01'"
TRAINED = {
    "decoupled": (f"{CORRECTION}.preset=decoupled_geo_rs_seq_tis", BAND),
    "scaled": (f"{CORRECTION}.preset=decoupled_token_is", f"{CORRECTION}.log_ratio_scale=sum"),
    "normalized": (
        f"{CORRECTION}.preset=decoupled_seq_is",
        f"{CORRECTION}.log_ratio_scale=sqrt",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
    ),
    "recentred": (
        f"{CORRECTION}.preset=decoupled_geo_rs",
        BAND,
        f"{CORRECTION}.rejection_groups=recentre",
        f"{CORRECTION}.rollout_rs_denominator=all",
    ),
    "bypass": (f"{CORRECTION}.preset=bypass_ppo_clip_geo_rs", BAND),
    "centred": (f"{CORRECTION}.preset=bypass_ppo_clip", "actor.clip_center=drift"),
    "reinforce": (f"{CORRECTION}.preset=bypass_pg_geo_rs_seq_tis", BAND),
    "guard": (f"{CORRECTION}.preset=bypass_ppo_clip", "actor.loss_mode=grpo_guard"),
    "exact_kl": (
        f"{CORRECTION}.preset=null",
        f"{CORRECTION}.rollout_rs=seq_kl",
        f"{CORRECTION}.rollout_rs_threshold=0.0195",
        "actor.loss_mode=flow_dppo",
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_numbers_are_those_of_the_run(name, tmp_path):
    run_dir = tmp_path / "run"
    trainer.train(small_config(*TRAINED[name]), run_dir)
    logged = {record["step"]: record for record in read_metrics(run_dir / "metrics.jsonl")}
    rejected = []
    for step, path in log_probs.files(run_dir).items():
        alone = tmp_path / f"step_{step}"
        (alone / log_probs.FOLDER).mkdir(parents=True)
        shutil.copy(run_dir / "config.yaml", alone)
        shutil.copy(path, alone / log_probs.FOLDER)
        report = replay_run(alone)
        (own,) = [found.outcome for found in report.replays if found.of_run]
        metrics = logged[step]
        prefix = "actor/rollout_corr" if report.num_bypass else "rollout_corr"
        expected = {
            "loss": metrics["actor/loss"],
            "clipped": metrics.get("actor/pg_clipfrac"),
            "rejected_terms": metrics[f"{prefix}/rollout_rs_masked_fraction"],
            "mean_weight": metrics.get(f"{prefix}/rollout_is_mean"),
            "weight_std": metrics.get(f"{prefix}/rollout_is_std"),
            "max_weight": metrics.get(f"{prefix}/rollout_is_max"),
            "ess": metrics.get(f"{prefix}/rollout_is_eff_sample_size"),
        }
        if name != "bypass":  # whose samples are single terms
            expected["rejected_samples"] = metrics[f"{prefix}/rejected_ratio"]
        rejected.append(own.rejected_terms)
        for key, value in expected.items():
            found = getattr(own, key)
            assert found == (value if value is None else pytest.approx(value, rel=2e-5, abs=1e-8)), key
    rejects = BAND in TRAINED[name] or name == "exact_kl"
    assert any(0 < share < 1 for share in rejected) == rejects


def test_a_run_that_chooses_its_mode(tmp_path):
    """Each step is replayed in the mode that it was in; decoupled presets on decoupled steps."""
    trainer.train(
        small_config(
            f"{CORRECTION}.preset=disabled",
            f"{CORRECTION}.bypass_mode=auto",
            "rollout.n=24",
            "actor.clip_ratio=1e-5",
        ),
        tmp_path / "run",
    )
    report = replay_run(tmp_path / "run")
    assert report.num_bypass == 1
    found = by_label(report)
    own = found[THIS_RUN]
    assert (own.mode, own.of_run) == ("auto", True)
    assert own.outcome.cosines == pytest.approx([1, 1])
    assert found["disabled"].outcome.cosines == [None, pytest.approx(1)]
    assert found["bypass_ppo_clip"].outcome.cosines[0] == pytest.approx(1)
    assert found["bypass_ppo_clip"].outcome.cosines[1] < 0.99
    losses = [
        record["actor/loss"]
        for record in read_metrics(tmp_path / "run/metrics.jsonl")
        if "actor/loss" in record
    ]
    assert own.outcome.loss == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_modes_may_take_turns_under_any_correction(tmp_path):
    parts = [terms_of(seed=step, bypass=step != 1, kls=True) for step in range(3)]
    own = (f"{CORRECTION}.preset=decoupled_token_is", f"{CORRECTION}.bypass_mode=auto")
    run_dir = write_run(tmp_path / "run", parts, *own, "actor.loss_mode=grpo_guard")
    found = by_label(replay_run(run_dir))
    assert found[THIS_RUN].outcome.cosines == pytest.approx([1, 1, 1], abs=1e-5)
    assert found["decoupled_token_is"].outcome.cosines == [None, pytest.approx(1, abs=1e-5), None]


# Against autograd ------------------------------------------------------------------------------------------------


def weights_of(terms, target, preset):
    correction = RolloutCorrectionConfig.from_preset(preset)
    return compute_rollout_correction_and_rejection_mask(
        target,
        terms.rollout_log_probs,
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
        num_elements=D,
    )


@pytest.mark.parametrize("preset", ["disabled", "decoupled_geo_rs_token_tis", "decoupled_token_icepop"])
@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_coefficients_are_the_gradient_of_the_mean_loss(preset, denominator):
    terms = terms_of()
    settings_of_run = config.load("tiny_jpeg_lora")
    correction = RolloutCorrectionConfig.from_preset(preset, rollout_rs_denominator=denominator)
    found = replay(stack([terms]), settings_of_run, correction)
    log_prob = terms.current_log_probs.clone().requires_grad_()
    expected = weights_of(terms, terms.old_log_probs, preset)
    loss = flow_grpo(
        log_prob,
        terms.old_log_probs,
        terms.advantages[:, None].expand(-1, 2),
        clip_ratio=settings_of_run.actor.clip_ratio,
        adv_clip_max=settings_of_run.actor.adv_clip_max,
        weight=expected.weights,
        keep=expected.keep,
    )
    loss.mean(denominator).backward()
    torch.testing.assert_close(found.coefficients, log_prob.grad, rtol=1e-6, atol=0)
    assert found.loss_sum / found.count == pytest.approx(loss.mean(denominator).item(), rel=1e-6)
    assert torch.equal(found.keep, expected.keep)


def test_coefficients_of_a_decoupled_term_by_hand():
    """`-w A ratio / n`, and 0 where the clip range is left upwards by a good term, or downwards by a bad one."""
    old = torch.zeros(4, 1, dtype=torch.float64)
    terms = replace(
        terms_of(4, 1),
        rollout_log_probs=torch.full_like(old, -0.5),
        old_log_probs=old,
        current_log_probs=torch.tensor([[0.1], [0.1], [-0.1], [0.01]], dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, -2.0, 3.0], dtype=torch.float64),
    )
    settings_of_run = config.load("tiny_jpeg_lora", ["actor.clip_ratio=0.05"])
    found = replay(stack([terms]), settings_of_run, RolloutCorrectionConfig.token_is())
    weight = math.exp(0.5)
    expected = [0, weight * math.exp(0.1) / 4, 0, -3 * weight * math.exp(0.01) / 4]
    assert found.coefficients.flatten().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("most", "precision"), [(10**6, 1e-6), (2000, 2e-4)])
def test_factors_of_weights_are_their_quantiles(tmp_path, monkeypatch, most, precision):
    monkeypatch.setattr(lab, "_MAX_FACTORS", most)
    terms = terms_of(4096)
    run_dir = write_run(tmp_path / "run", [terms], "actor.clip_ratio=1")
    weights = (terms.old_log_probs - terms.rollout_log_probs).exp().flatten()
    expected = [weights.quantile(level).item() for level in lab.FACTOR_LEVELS]
    assert expected[0] < 0.998 < 1.002 < expected[-1]
    outcome = by_label(replay_run(run_dir, presets=["decoupled_token_is"]))["decoupled_token_is"].outcome
    assert outcome.factors == pytest.approx(expected, abs=precision)


def test_factors_of_a_rejection_are_zero_and_all_terms_over_kept_ones(tmp_path):
    band = f"{CORRECTION}.rollout_rs_threshold='0.999_1.001'"
    rejecting = (f"{CORRECTION}.preset=decoupled_geo_rs", band, "actor.clip_ratio=1")
    report = replay_run(write_run(tmp_path / "run", [terms_of(4096)], *rejecting))
    (outcome,) = [found.outcome for found in report.replays if found.of_run]
    assert 0.05 < outcome.rejected_terms < 0.95
    assert outcome.factors[0] == 0
    assert outcome.factors[-1] == pytest.approx(1 / (1 - outcome.rejected_terms), rel=1e-6)


def test_coefficients_of_bypass():
    terms = terms_of()
    settings_of_run = config.load("tiny_jpeg_lora")
    advantage = terms.advantages[:, None].expand(-1, 2)
    log_prob = terms.current_log_probs.clone().requires_grad_()
    clipped = flow_grpo(log_prob, terms.rollout_log_probs, advantage, clip_ratio=1e-3, adv_clip_max=5.0)
    clipped.mean().backward()
    found = replay(stack([terms]), settings_of_run, RolloutCorrectionConfig.bypass_ppo_clip())
    torch.testing.assert_close(found.coefficients, log_prob.grad)
    log_prob.grad = None
    expected = weights_of(terms, terms.current_log_probs, "bypass_pg_geo_rs_seq_tis")
    reinforce(
        log_prob, advantage, adv_clip_max=5.0, weight=expected.weights, keep=expected.keep
    ).mean().backward()
    found = replay(
        stack([terms]), settings_of_run, RolloutCorrectionConfig.from_preset("bypass_pg_geo_rs_seq_tis")
    )
    assert 0 < expected.keep.double().mean() < 1
    torch.testing.assert_close(found.coefficients, log_prob.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss_mode", ["grpo_guard", "flow_dppo"])
@pytest.mark.parametrize("bypass", [False, True])
def test_exact_kls_stand_for_step_means(loss_mode, bypass):
    """Step means of many elements and one stand-in of the same KL give the same gradient and the same rejection."""
    draw = torch.Generator().manual_seed(1)
    terms = terms_of(12, 2)
    stds = terms.stds[..., None]
    rollout_mean, old_mean, mean = (
        1e-3 * stds * torch.randn(12, 2, D, generator=draw, dtype=torch.float64) for _ in range(3)
    )

    def kl(one, other):
        return ((one - other).square() / (2 * stds.square())).mean(-1)

    terms = replace(
        terms,
        old_rollout_kl=kl(old_mean, rollout_mean),
        current_old_kl=kl(mean, old_mean),
        current_rollout_kl=kl(mean, rollout_mean),
    )
    settings_of_run = config.load("tiny_jpeg_lora", [f"actor.loss_mode={loss_mode}"])
    bound = kl(mean if bypass else old_mean, rollout_mean).median().item()
    correction = RolloutCorrectionConfig(bypass_mode=bypass, rollout_rs="step_kl", rollout_rs_threshold=bound)
    found = replay(stack([terms]), settings_of_run, correction)
    assert torch.equal(found.keep, kl(mean if bypass else old_mean, rollout_mean) <= bound)
    log_prob = terms.current_log_probs.clone().requires_grad_()
    shared = {
        "mean": mean,
        "old_mean": rollout_mean if bypass else old_mean,
        "std": terms.stds,
        "keep": found.keep,
        "adv_clip_max": 5.0,
    }
    old = terms.rollout_log_probs if bypass else terms.old_log_probs
    advantage = terms.advantages[:, None].expand(-1, 2)
    if loss_mode == "grpo_guard":
        loss = grpo_guard(
            log_prob, old, advantage, step=terms.sigmas - terms.sigmas_next, clip_ratio=1e-3, **shared
        )
    else:
        loss = flow_dppo(log_prob, old, advantage, kl_threshold=settings_of_run.actor.kl_threshold, **shared)
    loss.mean().backward()
    torch.testing.assert_close(found.coefficients, log_prob.grad, rtol=1e-9, atol=1e-15)


# Many steps ------------------------------------------------------------------------------------------------------


def same_outcomes(one, other):
    ours, theirs = by_label(one), by_label(other)
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        expected = theirs[name].outcome
        for key in Outcome.__slots__:
            value, wanted = getattr(found.outcome, key), getattr(expected, key)
            assert value == (wanted if wanted is None else pytest.approx(wanted, rel=1e-9, abs=1e-12)), key


def test_steps_may_be_stacked(tmp_path, monkeypatch):
    """All steps at once, and one by one; groups of two steps are not confused, nor batches normalised together."""
    own = (
        f"{CORRECTION}.preset=null",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
        f"{CORRECTION}.log_ratio_scale=100",
        f"{CORRECTION}.rollout_rs=token_k1,step_z",
        f"{CORRECTION}.rollout_rs_threshold=0.9_1.1,3.0",
        f"{CORRECTION}.rejection_groups=recentre",
    )
    parts = [terms_of(samples, seed=samples, shift=samples / 8) for samples in (8, 16, 12)]
    run_dir = write_run(tmp_path / "run", parts, *own)
    whole = replay_run(run_dir, scales=["sum"])
    monkeypatch.setattr(lab_replay, "CHUNK_TERMS", 1)
    same_outcomes(whole, replay_run(run_dir, scales=["sum"]))
    assert whole.num_samples == 36
    assert 0 < by_label(whole)[f"{THIS_RUN}, 100"].outcome.rejected_terms < 1


def test_pooled_numbers_are_over_all_steps(tmp_path):
    parts = [terms_of(8, seed=1), terms_of(8, seed=2, shift=20.0)]
    joined = by_label(replay_run(write_run(tmp_path / "run", parts)))
    alone = [
        by_label(replay_run(write_run(tmp_path / f"{place}", [part]))) for place, part in enumerate(parts)
    ]
    for name, found in joined.items():
        one, other = (report[name].outcome for report in alone)
        assert found.outcome.rejected_terms == pytest.approx((one.rejected_terms + other.rejected_terms) / 2)
        assert found.outcome.cosines == pytest.approx([one.cosine, other.cosine])
        assert found.outcome.least_cosine == pytest.approx(min(one.cosine, other.cosine))
        if one.mean_weight is not None:
            assert found.outcome.mean_weight == pytest.approx((one.mean_weight + other.mean_weight) / 2)
            assert found.outcome.max_weight == max(one.max_weight, other.max_weight)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 10**6), st.booleans())
def test_no_correction_is_no_correction(samples, steps, seed, spoilt):
    terms = terms_of(samples, steps, seed=seed)
    if spoilt:
        terms.current_log_probs[0, 0] = math.nan
    settings_of_run = config.load("tiny_jpeg_lora")
    found = replay(stack([terms]), settings_of_run, RolloutCorrectionConfig.disabled())
    expected = replay(stack([terms]), settings_of_run, None)
    assert torch.equal(found.coefficients, expected.coefficients)
    assert found.coefficients.isfinite().all()
    assert found.loss_sum == expected.loss_sum


def test_every_preset_has_a_row_and_every_scale(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of()], f"{CORRECTION}.preset=decoupled_seq_is")
    report = replay_run(run_dir)
    names = [name for name, text in PRESETS.items() if not text.startswith("= ")]
    assert sorted(found.name for found in report.replays) == sorted(names)
    assert [found.name for found in report.replays if found.of_run] == ["decoupled_seq_is"]
    cosines = [found.outcome.cosine for found in report.replays]
    assert cosines == pytest.approx(sorted(cosines, reverse=True), abs=1e-4)
    scaled = by_label(replay_run(run_dir, presets=["seq_is", "disabled"], scales=["mean", "sum", 2.0]))
    assert scaled.keys() == {"seq_is", "seq_is, sum", "seq_is, 2", "disabled"}
    assert scaled["seq_is"].of_run  # by its values, not by its name
    delta = (terms_of().old_log_probs - terms_of().rollout_log_probs).sum(1)
    expected = (D * delta).exp().clamp(max=2).mean().item()
    assert scaled["seq_is, sum"].outcome.mean_weight == pytest.approx(expected, rel=1e-9)


# What cannot be replayed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "terms", "preset", "reason"),
    [
        ([], {"bypass": True}, "decoupled_seq_is", "in bypass mode, old log-probs are the rollout's"),
        (["actor.loss_mode=grpo_guard"], {}, "disabled", "exact KLs between policies"),
        (["actor.loss_mode=grpo_guard"], {}, "pg_is", "contradicts algorithm.rollout_correction.loss_type"),
        (["actor.ratio_level=trajectory_sum"], {}, "bypass_ppo_clip", "needs the whole window in one loss"),
        (["actor.clip_center=drift"], {}, "bypass_ppo_clip", "needs a drift that the run did not measure"),
        (["actor.loss_mode=grpo_guard"], {"kls": True}, "disabled", ""),
        ([], {}, "bypass_ppo_clip", ""),
    ],
)
def test_why_terms_cannot_be_replayed(overrides, terms, preset, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a clip_center without effect
        settings_of_run = config.load("tiny_jpeg_lora", overrides)
    found = obstacle(terms_of(**terms), settings_of_run, RolloutCorrectionConfig.from_preset(preset))
    assert (reason in found) if reason else (found == "")


def test_presets_that_cannot_be_replayed_have_a_reason(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of(bypass=True)], f"{CORRECTION}.preset=bypass_ppo_clip")
    report = by_label(replay_run(run_dir))
    assert report["disabled"].outcome is None
    assert "dump a run with bypass_mode=false" in report["disabled"].reason
    assert report["bypass_ppo_clip"].outcome.cosine == pytest.approx(1)
    few = by_label(replay_run(run_dir, presets=["seq_is"]))
    assert {name: found.outcome is None for name, found in few.items()} == {
        "seq_is": True,
        "bypass_ppo_clip": False,  # the run's own is never left out
    }


def test_a_loss_that_reads_means_in_secret(tmp_path, monkeypatch):
    module = tmp_path / "secretive.py"
    module.write_text(
        "from dataclasses import replace\n"
        "from flowcorr.losses import LOSSES\n"
        "def loss(policy, batch, settings):\n"
        "    found = LOSSES['flow_grpo'](policy, batch, settings)\n"
        "    return replace(found, loss_sum=found.loss_sum + policy.mean.sum())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = write_run(
        tmp_path / "run", [terms_of()], "actor.loss_mode=secretive:loss", f"{CORRECTION}=null"
    )
    with pytest.raises(
        ConfigError, match="no preset that was asked for can be replayed.*must set needs_means"
    ):
        replay_run(run_dir, presets=["disabled"])


def test_mistakes_are_named(tmp_path):
    empty = write_run(tmp_path / "empty", [])
    with pytest.raises(ConfigError, match="holds no dumped step; train with trainer.dump_log_probs=true"):
        replay_run(empty)
    with pytest.raises(ConfigError, match="holds no run"):
        replay_run(tmp_path)
    run_dir = write_run(tmp_path / "run", [terms_of()])
    with pytest.raises(ConfigError, match=r"--presets='seq_iss' is unknown.*did you mean seq_is"):
        replay_run(run_dir, presets=["seq_iss"])
    with pytest.raises(ConfigError, match=r"--scales='summ' is unknown.*did you mean sum"):
        parse_scales("mean,summ")
    with pytest.raises(ConfigError, match=r"--scales='-1'"):
        parse_scales("-1")
    assert parse_scales("mean, 2.5") == ["mean", 2.5]


# In words --------------------------------------------------------------------------------------------------------


def replayed(name, **changes):
    values = dict.fromkeys(Outcome.__slots__, 0.0) | {"cosine": 1.0, "relative_norm": 1.0, "cosines": [1.0]}
    values["factors"] = [1.0] * 5
    return Replay(
        name=name,
        aliases=(),
        mode="decoupled",
        scale="mean",
        of_run=False,
        outcome=Outcome(**(values | changes)),
    )


def test_reading():
    text = read(
        [
            replayed("a"),
            replayed("b", relative_norm=0.5),
            replayed("c", cosine=0.7, changed_terms=0.3, clipped=0.4),
            replayed("d", cosine=0.5, changed_terms=0.6, rejected_terms=0.6),
            replayed("e", cosine=0.25, changed_terms=0.9, rejected_terms=0.9),
            replayed("f", cosine=0.9, changed_terms=0.0),
            replayed("g", cosine=0.8, changed_terms=0.2, appeared_terms=0.2),
        ]
    )
    assert text == (
        "Of 7 replays, 2 leave the gradient as it is but for its length: a, b; 2 turn it by rejection (cosine 0.250 to "
        "0.500): d, e; 1 turns it by clipping (cosine 0.700): c; 1 turns it by not clipping (cosine 0.800): g; 1 turns "
        "it by weights (cosine 0.900): f."
    )
    assert read([replayed("d", cosine=0.5, changed_terms=0.6, rejected_terms=0.6)]).startswith(
        "Of 1 replay, none leaves the gradient as it is"
    )


def test_what_reinforce_does_not_clip_is_not_called_weights(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of(bypass=True)], "actor.clip_ratio=1e-4")
    report = replay_run(run_dir, presets=["bypass_pg_is"])
    outcome = by_label(report)["bypass_pg_is"].outcome
    assert outcome.appeared_terms == outcome.changed_terms > 0.1
    assert "1 turns it by not clipping" in report.reading


def test_a_report_is_json(tmp_path):
    report = replay_run(write_run(tmp_path / "run", [terms_of()]))
    assert json.loads(json.dumps(report.to_mapping(), allow_nan=False))["num_elements"] == D
