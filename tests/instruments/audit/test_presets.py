"""Presets side by side on the dumped steps of a run; the numbers of its own are those of training."""

import shutil

import pytest
import torch
from instruments.dumped_runs import CORRECTION, D, terms_of, write_run
from instruments.html_pages import drawn

from flowcorr import config, dumps, trainer
from flowcorr.correction import (
    PRESETS,
)
from flowcorr.errors import ConfigError
from flowcorr.instruments.audit import audit_folder
from flowcorr.instruments.audit.dumped import presets_of
from flowcorr.instruments.audit.effect import stack, steps_of
from flowcorr.instruments.audit.presets import THIS_RUN, compare, preset_charts, preset_table
from flowcorr.instruments.steps import read_dumped
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


def replay_run(folder, *, allow_imports=()):
    return presets_of(read_dumped(folder, allow_imports=allow_imports))


def by_name(presets):
    return {found.name: found for found in presets}


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
        (own,) = [found.numbers for found in report if found.of_run]
        metrics = logged[step]
        prefix = "actor/rollout_corr" if dumps.load(path).bypass else "rollout_corr"
        expected = {
            "loss": metrics["actor/loss"],
            "clipped": metrics.get("actor/pg_clipfrac"),
            "rejected_terms": metrics[f"{prefix}/rollout_rs_masked_fraction"],
            "weight": 1.0 if name == "normalized" else metrics.get(f"{prefix}/rollout_is_mean"),
            "ess": metrics.get(f"{prefix}/rollout_is_eff_sample_size"),
        }
        if name != "bypass":  # whose samples are single terms
            expected["rejected_samples"] = metrics[f"{prefix}/rejected_ratio"]
        rejected.append(own["rejected_terms"])
        for key, value in expected.items():
            assert own[key] == (value if value is None else pytest.approx(value, rel=2e-5, abs=1e-8)), key
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
    found = by_name(report)
    own = found[THIS_RUN]
    assert own.of_run
    assert own.cosines == pytest.approx({1: 1, 2: 1})
    assert found["disabled"].cosines == pytest.approx({2: 1})
    assert found["bypass_ppo_clip"].cosines[1] == pytest.approx(1)
    assert found["bypass_ppo_clip"].cosines[2] < 0.99
    losses = [
        record["actor/loss"]
        for record in read_metrics(tmp_path / "run/metrics.jsonl")
        if "actor/loss" in record
    ]
    assert own.numbers["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_modes_may_take_turns_under_any_correction(tmp_path):
    parts = [terms_of(seed=step, bypass=step != 1, kls=True) for step in range(3)]
    own = (f"{CORRECTION}.preset=decoupled_token_is", f"{CORRECTION}.bypass_mode=auto")
    run_dir = write_run(tmp_path / "run", parts, *own, "actor.loss_mode=grpo_guard")
    found = by_name(replay_run(run_dir))
    assert found[THIS_RUN].cosines == pytest.approx({1: 1, 2: 1, 3: 1}, abs=1e-5)
    assert found["decoupled_token_is"].cosines == pytest.approx({2: 1}, abs=1e-5)


# Many steps ------------------------------------------------------------------------------------------------------


def test_steps_may_be_stacked(tmp_path):
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
    run = read_dumped(write_run(tmp_path / "run", parts, *own))
    assert [steps.sizes for steps in steps_of(run)] == [{1: 8, 2: 16, 3: 12}]
    alone = [stack({number: step.terms}, run.setting, of_flowcorr=True) for number, step in run.steps.items()]
    whole, expected = (by_name(compare(steps, run.setting.correction)) for steps in (steps_of(run), alone))
    assert whole.keys() == expected.keys()
    for name, found in whole.items():
        numbers = {key: value for key, value in expected[name].numbers.items() if value is not None}
        assert {key: found.numbers[key] for key in numbers} == pytest.approx(numbers, rel=1e-9, abs=1e-12)
        assert found.cosines == pytest.approx(expected[name].cosines, rel=1e-9, abs=1e-12)
    assert 0 < whole[f"{THIS_RUN}, 100"].numbers["rejected_terms"] < 1


def test_pooled_numbers_are_over_all_steps(tmp_path):
    parts = [terms_of(8, seed=1), terms_of(8, seed=2, shift=20.0)]
    joined = by_name(replay_run(write_run(tmp_path / "run", parts)))
    alone = [
        by_name(replay_run(write_run(tmp_path / f"{place}", [part]))) for place, part in enumerate(parts)
    ]
    for name, found in joined.items():
        one, other = (report[name] for report in alone)
        assert found.numbers["rejected_terms"] == pytest.approx(
            (one.numbers["rejected_terms"] + other.numbers["rejected_terms"]) / 2
        )
        assert found.cosines == pytest.approx({1: one.numbers["cosine"], 2: other.numbers["cosine"]})
        assert found.numbers["least_cosine"] == pytest.approx(
            min(one.numbers["cosine"], other.numbers["cosine"])
        )
        if one.numbers["weight"] is not None:
            assert found.numbers["weight"] == pytest.approx(
                (one.numbers["weight"] + other.numbers["weight"]) / 2
            )


def test_weights_are_those_that_multiply_the_loss(tmp_path):
    """After normalisation, which scales each training step by its own mean weight."""
    own = (f"{CORRECTION}.preset=decoupled_token_is", f"{CORRECTION}.rollout_is_batch_normalize=true")
    parts = [terms_of(8, seed=1, shift=300.0), terms_of(16, seed=2, shift=30.0)]
    found = by_name(replay_run(write_run(tmp_path / "run", parts, *own)))
    raw = [(one.old_log_probs - one.rollout_log_probs).exp().clamp(max=2) for one in parts]
    for name, weights in (
        ("decoupled_token_is", raw),
        (THIS_RUN, [one / one.mean() for one in raw]),
    ):
        every = torch.cat([one.flatten() for one in weights])
        assert found[name].numbers["weight"] == pytest.approx(float(every.mean()), rel=1e-6)
        ess = float(every.sum() ** 2 / every.square().sum() / len(every))
        assert found[name].numbers["ess"] == pytest.approx(ess, rel=1e-6)


def test_every_preset_has_a_row(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of()], f"{CORRECTION}.preset=decoupled_seq_is")
    found = replay_run(run_dir)
    assert sorted(one.name for one in found) == sorted(PRESETS)
    assert [one.name for one in found if one.of_run] == ["decoupled_seq_is"]
    cosines = [one.numbers["cosine"] for one in found]
    assert cosines == pytest.approx(sorted(cosines, reverse=True), abs=1e-4)


def test_the_runs_own_scale_is_tried(tmp_path):
    own = (f"{CORRECTION}.preset=decoupled_seq_is", f"{CORRECTION}.log_ratio_scale=sum")
    scaled = by_name(replay_run(write_run(tmp_path / "run", [terms_of()], *own)))
    delta = (terms_of().old_log_probs - terms_of().rollout_log_probs).sum(1)
    expected = (D * delta).exp().clamp(max=2).mean().item()
    assert scaled[f"{THIS_RUN}, sum"].numbers["weight"] == pytest.approx(
        expected, rel=1e-6
    )  # float32, as applied


# What cannot be replayed -----------------------------------------------------------------------------------------


def test_presets_that_cannot_be_replayed_have_a_reason(tmp_path):
    run_dir = write_run(tmp_path / "run", [terms_of(bypass=True)], f"{CORRECTION}.preset=bypass_ppo_clip")
    report = by_name(replay_run(run_dir))
    assert report["disabled"].numbers == {}
    assert "bypass_mode=false" in report["disabled"].reason
    assert report["bypass_ppo_clip"].numbers["cosine"] == pytest.approx(1)
    (table,) = [table for table in audit_folder(run_dir).tables if table.name == "presets"]
    assert "13 are not replayed (in bypass mode" in table.note


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
    found = by_name(replay_run(run_dir, allow_imports=["overflowing:loss"]))
    assert found["disabled"].numbers == {}
    assert "finite" in found["disabled"].reason


def test_a_run_without_dumped_steps_is_refused_with_the_key_that_dumps_them(tmp_path):
    empty = write_run(tmp_path / "empty", [])
    with pytest.raises(ConfigError, match=r"empty/log_probs .*trainer\.dump_log_probs=true"):
        replay_run(empty)


# As a table and charts -------------------------------------------------------------------------------------------


def test_rows_that_change_nothing_are_idle_and_turned_ones_have_a_line(tmp_path):
    parts = [terms_of(64, seed=1), terms_of(64, seed=2, shift=5.0)]
    replays = replay_run(write_run(tmp_path / "run", parts, f"{CORRECTION}.preset=decoupled_seq_is"))
    table = preset_table(replays)
    marks = {row[0]: mark for row, mark in zip(table.rows, table.marks, strict=True)}
    assert [name.split()[0] for name, mark in marks.items() if mark == "this"] == ["decoupled_seq_is"]
    assert marks["disabled"] == "idle"
    assert marks["decoupled_geo_rs"] == ""
    charts = preset_charts(replays)
    labels = [label.get_text() for label in drawn(charts["presets_direction"]).get_yticklabels()]
    assert labels == [row[0] for row in table.rows]
    assert list(drawn(charts["presets_over_training"]).lines[0].get_xdata()) == [1, 2]
    assert "presets_over_training" not in preset_charts(replay_run(write_run(tmp_path / "one", parts[:1])))
