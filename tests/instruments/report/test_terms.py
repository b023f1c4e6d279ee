"""Ratios and mismatch of dumped terms."""

import math
import re

import pytest
import torch
from instruments.foreign_dumps import draw_steps
from instruments.run_folders import dump, write_run

from flowcorr import dumps
from flowcorr.instruments.report import runs as report_runs
from flowcorr.instruments.report.charts import chart_sections
from flowcorr.instruments.report.runs import group_by_seed, read_run

CORRECTION = "algorithm.rollout_correction"
NUM_TERMS = re.compile(r"(\d+) terms of (\d+) training steps")


def captions(folder):
    """All that the section on ratios and mismatch says."""
    sections = chart_sections(group_by_seed([read_run(folder)]))
    (section,) = [section for section in sections if section.title == "Ratios and mismatch"]
    return " ".join([section.text, *(chart.caption for chart in section.pictures.values())])


def test_without_dumped_terms_one_sentence_tells_how(tmp_path):
    text = captions(write_run(tmp_path / "a"))
    assert "trainer.dump_log_probs=true" in text
    assert "dashed" not in text


def test_dumped_terms_are_drawn(tmp_path):
    folder = write_run(tmp_path / "a", "actor.clip_ratio=1e-3")
    dump(folder)
    text = captions(folder)
    assert "dump_log_probs" not in text
    terms = [dumps.load(path) for path in dumps.files(folder).values()]
    ratio = torch.cat([part.current_log_probs - part.old_log_probs for part in terms]).exp()
    above, below = ((ratio > 1.001).double().mean(), (ratio < 0.999).double().mean())
    assert f"{above:.1%} above, {below:.1%} below" in text
    assert NUM_TERMS.findall(text) == [("256", "2")]
    assert "50% are 0" in text
    gap = torch.cat([part.old_log_probs - part.rollout_log_probs for part in terms])
    stds = [f"{step}: {gap[:, step].mean():.1e} ± {gap[:, step].std(correction=0):.1e}" for step in (0, 1)]
    assert ", ".join(stds) in text


@pytest.mark.parametrize(
    ("overrides", "dumped", "expected"),
    [
        ([f"{CORRECTION}.preset=bypass_ppo_clip"], {"bypass": True}, "current less rollout"),
        ([], {"scale": 1e-5}, "outside this plot: 0.0% above, 0.0% below"),
        ([], {"scale": 0.0}, "0 everywhere"),
        (["actor.clip_ratio=[1e-3, 1e-9, 1e-3, 1e-3]"], {}, "clip ranges of its step"),
        (["actor.loss_mode=flow_dppo"], {}, "no clip range"),
        ([f"{CORRECTION}.preset=bypass_pg_is"], {"bypass": True}, "no clip range"),
        # exp((0 + 2e-3) / 2) leaves a range of 9e-4 wherever nothing was learned yet
        (["actor.loss_mode=grpo_guard", "actor.clip_ratio=9e-4"], {"scale": 0.0}, "100.0% above, 0.0% below"),
    ],
)
def test_ratios_are_those_that_the_loss_clips(overrides, dumped, expected, tmp_path):
    folder = write_run(tmp_path / "a", *overrides)
    dump(folder, **dumped)
    assert expected in captions(folder)


def test_a_clip_range_that_was_not_dumped_is_not_said_to_be_missing(tmp_path):
    text = captions(draw_steps(tmp_path / "a", without=("clip_ratio",)))
    assert "the clip range is not known" in text
    assert "no clip range" not in text


def test_the_mismatch_of_bypass_is_of_what_was_scored_before_an_update(tmp_path):
    folder = write_run(tmp_path / "a", f"{CORRECTION}.preset=bypass_ppo_clip")
    dump(folder, bypass=True)  # of the second half of its samples, the policy has moved
    assert "±" in captions(folder)
    dump(folder, bypass=True, before_update=torch.arange(64)[:, None].expand(64, 2) < 32)
    assert "0 everywhere" in captions(folder)


@pytest.mark.parametrize(
    ("trained", "rows"), [([0.1, math.nan], ["1"]), ([math.nan, math.nan], [])], ids=["one", "none"]
)
def test_a_step_that_nobody_trained_has_no_mismatch(trained, rows, tmp_path):
    """Indices of the window's steps are 1 and 3."""
    text = captions(draw_steps(tmp_path, old_log_probs=torch.tensor([trained]).expand(32, 2)))
    assert re.findall(r"(\d+): \S+ ± ", text) == rows
    assert not re.search(r"nan|0 everywhere", text)


def test_of_many_steps_some_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(report_runs, "MAX_STEPS", 3)
    folder = write_run(tmp_path / "a")
    dump(folder, steps=7)
    assert NUM_TERMS.findall(captions(folder)) == [("384", "3")]
