"""Runs read back from their folders."""

import pytest
from diagnostics.foreign_dumps import draw_steps
from diagnostics.run_folders import write_run

from flowcorr.diagnostics.report.runs import differences, group_by_seed, read_run


def test_seeds_become_a_band(runs):
    groups = group_by_seed([read_run(folder) for folder in runs])
    assert [group.label for group in groups] == ["a, b", "c <script>"]
    assert groups[0].band("reward/mean")[0] == pytest.approx((1, 0.15625, 0.125, 0.1875))
    assert groups[0].band("rollout_corr/rollout_is_mean") == []


def test_groups_of_one_name_are_told_apart_by_their_parents(tmp_path):
    folders = [write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", "actor.lr=1e-4")]
    groups = group_by_seed([read_run(folder) for folder in folders])
    assert [group.label for group in groups] == ["x/run", "y/run"]


def test_differences_name_the_keys_that_differ(runs, evil):
    groups = group_by_seed([read_run(folder) for folder in runs])
    assert differences(groups) == {
        "sampling.guidance_scale": ["1.0", "2.0"],
        "sampling.negative_prompt": ["", evil],
    }


def test_another_trainers_dump_is_a_run(tmp_path):
    run = read_run(draw_steps(tmp_path / "foreign", without=("sigmas",)))
    assert run.name == "foreign"
    assert run.settings == {"actor.loss_mode": "flow_grpo", "actor.clip_ratio": "0.0001"}
    assert run.last_step == 3
    assert "sigmas" in run.notes[0]


def test_the_error_of_a_run_is_shown_without_its_secrets(tmp_path):
    terms = "reward.terms=[{name: http, options: {url: 'https://host/KEY', api_key: s3cret}}]"
    failure = {
        "step": 2,
        "kind": "failure",
        "error": "BackendError: 401 for s3cret at https://host/KEY" + "!" * 9999,
    }
    run = read_run(write_run(tmp_path / "a", terms, events=[failure]))
    assert run.ending.startswith("failed after step 2: BackendError: 401 for *** at https://host/***")
    assert "s3cret" not in f"{run.ending}{run.settings}"
    assert "KEY" not in f"{run.ending}{run.settings}"
    assert len(run.ending) < 2100
