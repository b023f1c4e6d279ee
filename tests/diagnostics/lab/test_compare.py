"""Presets side by side on the dumped steps of a run; the numbers of its own are those of training."""

import json
import shutil

import pytest
import torch
from diagnostics.dumped_runs import CORRECTION, D, terms_of, write_run
from diagnostics.foreign_dumps import draw_steps

from flowcorr import config, dumps, trainer
from flowcorr.correction import (
    PRESETS,
)
from flowcorr.diagnostics.lab import compare as lab
from flowcorr.diagnostics.lab import replay as lab_replay
from flowcorr.diagnostics.lab.compare import THIS_RUN, Outcome, Replay, parse_scales, read, replay_run
from flowcorr.errors import ConfigError
from flowcorr.trackers import read_metrics
from tests.shallow import SHALLOW

SMALL = (
    f"model.path={SHALLOW}",
    "sampling.height=16",
    "sampling.width=32",
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


def small_config(*overrides):
    return config.load("tiny_jpeg_lora", [*SMALL, *overrides])


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
    "reinforce": (f"{CORRECTION}.preset=bypass_pg_geo_rs_seq_tis", BAND),
    "guard": (f"{CORRECTION}.preset=bypass_ppo_clip", "actor.loss_mode=grpo_guard"),
    "exact_kl": (
        f"{CORRECTION}.preset=null",
        f"{CORRECTION}.rollout_rs=seq_kl",
        f"{CORRECTION}.rollout_rs_threshold=0.0207",
        "actor.loss_mode=flow_dppo",
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_numbers_are_those_of_the_run(name, tmp_path):
    run_dir = tmp_path / "run"
    trainer.train(small_config(*TRAINED[name]), run_dir)
    logged = {record["step"]: record for record in read_metrics(run_dir / "metrics.jsonl")}
    rejected = []
    for step, path in dumps.files(run_dir).items():
        alone = tmp_path / f"step_{step}"
        (alone / dumps.FOLDER).mkdir(parents=True)
        shutil.copy(run_dir / "config.yaml", alone)
        shutil.copy(path, alone / dumps.FOLDER)
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


# Factors of terms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "precision"), [(10**6, 1e-6), (2000, 2e-4)])
def test_factors_of_weights_are_their_quantiles(tmp_path, monkeypatch, most, precision):
    monkeypatch.setattr(lab, "MAX_FACTORS", most)
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


def test_every_preset_has_a_row_and_every_scale(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of()], f"{CORRECTION}.preset=decoupled_seq_is")
    report = replay_run(run_dir)
    names = list(PRESETS)
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


def test_a_loss_that_is_not_finite_is_not_compared(tmp_path, monkeypatch):
    module = tmp_path / "overflowing.py"
    module.write_text(
        "from dataclasses import replace\n"
        "from flowcorr.losses import LOSSES\n"
        "def loss(terms, settings):\n"
        "    found = LOSSES['flow_grpo'].objective(terms, settings)\n"
        "    return replace(found, loss_sum=found.loss_sum + (1e6 * terms.std).exp().sum())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = write_run(
        tmp_path / "run", [terms_of()], "actor.loss_mode=overflowing:loss", f"{CORRECTION}=null"
    )
    with pytest.raises(
        ConfigError, match="no preset that was asked for can be replayed.*its loss is not finite"
    ):
        replay_run(run_dir, presets=["disabled"], allow_imports=["overflowing:loss"])


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
        "Of 7 replays, 2 change only the gradient's length, which Adam ignores: a, b; 2 turn the gradient by rejection "
        "(cosine 0.250 to 0.500): d, e; 1 turns the gradient by clipping (cosine 0.700): c; 1 turns the gradient by "
        "not clipping (cosine 0.800): g; 1 turns the gradient by weights (cosine 0.900): f."
    )
    assert read([replayed("d", cosine=0.5, changed_terms=0.6, rejected_terms=0.6)]).startswith(
        "Of 1 replay, none changes only the gradient's length"
    )


def test_what_reinforce_does_not_clip_is_not_called_weights(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of(bypass=True)], "actor.clip_ratio=1e-4")
    report = replay_run(run_dir, presets=["bypass_pg_is"])
    outcome = by_label(report)["bypass_pg_is"].outcome
    assert outcome.appeared_terms == outcome.changed_terms > 0.1
    assert "1 turns the gradient by not clipping" in report.reading


def test_a_report_is_json(tmp_path):
    report = replay_run(write_run(tmp_path / "run", [terms_of()]))
    assert json.loads(json.dumps(report.to_mapping(), allow_nan=False))["num_elements"] == D


# Of another trainer ----------------------------------------------------------------------------------------------


def test_another_trainers_dump_is_replayed(tmp_path):
    report = replay_run(draw_steps(tmp_path), scales=parse_scales("sum"))
    assert (report.num_elements, report.window, report.notes) == (4096, 2, ())
    found = by_label(report)
    assert not any(replay.of_run for replay in report.replays)
    assert found["disabled"].outcome.cosine == pytest.approx(1)
    assert found["bypass_ppo_clip"].outcome.clipped > 0.5
    assert found["decoupled_seq_is, sum"].outcome.weight_std > 0.1


def test_without_fields_what_they_give_is_named(tmp_path):
    folder = draw_steps(
        tmp_path, without=("current_log_probs", "clip_ratio", "num_elements", "sigmas", "group_ids")
    )
    report = replay_run(folder, scales=parse_scales("sum"))
    found = by_label(report)
    assert found["decoupled_token_is"].outcome.cosine == pytest.approx(1)
    assert found["decoupled_token_is, sum"].reason == "it needs num_elements, which was not dumped"
    assert "clip_ratio was not dumped" in found["bypass_ppo_clip"].reason
    assert len(report.notes) == 5


def test_terms_that_tell_nothing_are_not_rejected(tmp_path):
    """A bypass run of a trainer whose last step is never trained, and whose second half is scored after an update."""
    draw = torch.Generator().manual_seed(0)
    rollout = torch.randn(32, 2, generator=draw, dtype=torch.float64)
    late = (torch.arange(32) >= 16)[:, None].expand(32, 2)
    current = torch.where(late, rollout + 0.1, rollout)
    current[:, 1] = torch.nan
    draw_steps(
        tmp_path,
        without=("old_log_probs",),
        rollout_log_probs=rollout,
        current_log_probs=current,
        before_update=~late,
    )
    found = by_label(replay_run(tmp_path, presets=["bypass_ppo_clip_geo_rs", "bypass_pg_is"]))
    for replayed in found.values():
        assert (replayed.outcome.rejected_terms, replayed.outcome.rejected_samples) == (0, 0)
    assert found["bypass_pg_is"].outcome.mean_weight == 1
