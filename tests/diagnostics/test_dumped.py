"""Folders of steps that another trainer dumped, with little and with much in them."""

import pytest
import torch
from diagnostics.foreign_dumps import D, draw_steps

import flowcorr
from flowcorr import dumps
from flowcorr.diagnostics.dumped import UNBOUNDED, completed, read_dumped, records
from flowcorr.errors import ConfigError


def test_what_a_dump_tells_is_the_configuration(tmp_path):
    run = read_dumped(draw_steps(tmp_path))
    assert (run.of_flowcorr, run.notes) == (False, ())
    assert (run.config.actor.clip_ratio, run.config.sampling.num_inference_steps) == (1e-4, 4)
    assert (run.config.rollout.prompts_per_step, run.config.rollout.n) == (8, 4)
    assert not run.config.algorithm.rollout_correction.bypass_mode


def test_records_are_those_of_training(tmp_path):
    logged = records(read_dumped(draw_steps(tmp_path)))
    assert [record["step"] for record in logged] == [1, 2, 3]
    first = logged[0]
    assert first["rollout_corr/kl"] == pytest.approx(0.02**2 / 2, rel=0.3)
    assert first["rollout_corr/step_3/logprob_abs_diff"] > 0
    assert "rollout_corr/step_0/kl" not in first
    assert first["rollout_corr/clip_noise_fraction"] > 0.5
    assert first["actor/pg_clipfrac"] == 0
    assert first["reward/mean"] == 0.5
    assert first["reward/zero_std_group_fraction"] == 0
    assert first["rollout/num_elements"] == D


def test_what_is_missing_is_left_out(tmp_path):
    optional = (
        "current_log_probs",
        "rewards",
        "group_ids",
        "step_indices",
        "sigmas",
        "num_elements",
        "clip_ratio",
    )
    run = read_dumped(draw_steps(tmp_path, without=optional))
    assert [note.split(",")[0].removeprefix("not dumped: ") for note in run.notes] == [
        *("current_log_probs", "clip_ratio", "num_elements", "step_indices", "sigmas", "rewards", "group_ids")
    ]
    assert run.config.actor.clip_ratio == UNBOUNDED
    (first, *_) = records(run)
    assert {name.split("/")[0] for name in first} == {"step", "rollout_corr"}
    assert "rollout_corr/clip_noise_fraction" not in first


def test_noise_levels_stand_for_step_indices(tmp_path):
    """Windows of each sample's own; one noise level was rounded to bfloat16."""
    schedule = torch.tensor([1.0, 0.9, 0.7, 0.5])
    own = torch.stack([schedule[start : start + 2] for start in [0, 1, 2, 1] * 8])
    draw_steps(tmp_path, steps=1, without=("step_indices",), sigmas=own)
    rounded = torch.where(own == 0.9, own.bfloat16().float(), own)
    flowcorr.dump(tmp_path, 2, rollout_log_probs=own, old_log_probs=own, advantages=own[:, 0], sigmas=rounded)
    run = read_dumped(tmp_path)
    assert run.levels.tolist() == pytest.approx([1.0, 0.9, 0.7, 0.5], rel=1e-2)
    assert run.config.sampling.num_inference_steps == 4
    found = [completed(dumps.load(path), run.levels).step_indices for path in run.files.values()]
    assert torch.equal(found[0], found[1])
    assert found[0][:3].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert "rollout_corr/step_3/kl" in records(run)[0]


def test_in_bypass_the_drift_is_that_of_the_current_policy(tmp_path):
    run = read_dumped(draw_steps(tmp_path, without=("old_log_probs",), clip_ratio=[1e-4] * 4))
    assert run.config.algorithm.rollout_correction.bypass_mode
    (first, *_) = records(run)
    assert first["rollout_corr/kl"] == pytest.approx(0.02**2 / 2, rel=0.3)
    assert first["actor/pg_clipfrac"] > 0.5


def test_a_loss_that_reads_step_means_is_judged_by_its_ratio(tmp_path):
    run = read_dumped(draw_steps(tmp_path, loss_mode="grpo_guard"))
    assert run.config.actor.loss_mode == "flow_grpo"
    assert "grpo_guard reads step means" in run.notes[0]


def test_an_empty_folder_says_what_to_name(tmp_path):
    with pytest.raises(
        ConfigError, match="no dumped step; name the --out of flowcorr train, or a folder that"
    ):
        read_dumped(tmp_path)
