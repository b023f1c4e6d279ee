"""Runs read back from their folders."""

import os

import pytest
from instruments.foreign_dumps import draw_steps
from instruments.run_folders import write_run

from flowcorr.errors import ConfigError
from flowcorr.instruments.report.runs import differences, group_by_seed, read_run


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


def test_a_configuration_beside_dumped_steps_is_another_trainers(tmp_path):
    folder = draw_steps(tmp_path / "foreign")
    (folder / "config.yaml").write_text("launcher: accelerate\ntrain: {lr: 1e-4}\n")
    run = read_run(folder)
    assert run.config is None
    assert run.last_step == 3


def test_dumps_of_other_trainers_are_no_seeds_of_one_configuration(tmp_path):
    """Their losses are alike, and their gaps are 1,000,000 times apart."""
    folders = [
        draw_steps(tmp_path / "exact", r=2e-5),
        draw_steps(tmp_path / "coarse", r=0.02, num_elements=64),
    ]
    groups = group_by_seed([read_run(folder) for folder in folders])
    assert [(group.label, group.num_elements) for group in groups] == [("exact", 4096), ("coarse", 64)]
    exact, coarse = (group.means("rollout_corr/kl")[-1][1] for group in groups)
    assert exact < 1e-5 < coarse == pytest.approx(0.02**2 / 2, rel=0.3)


def test_the_error_of_a_run_is_shown_without_its_secrets(tmp_path):
    terms = "reward.terms=[{name: http, options: {url: 'https://host/KEY', api_key: s3cret}}]"
    failure = {
        "step": 2,
        "kind": "failure",
        "error": "BackendError: 401 for s3cret at https://host/KEY" + "!" * 9999,
    }
    run = read_run(write_run(tmp_path / "a", terms, events=[failure]))
    assert "step 2: BackendError" in run.ending
    assert run.ending.count("***") == 2
    assert "s3cret" not in f"{run.ending}{run.settings}"
    assert "KEY" not in f"{run.ending}{run.settings}"
    assert len(run.ending) < 2100


@pytest.mark.parametrize("size", [-5, 0, 1.5])
def test_a_size_of_latents_that_cannot_be_is_named(size, tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "rollout/num_elements": {size}}}\n')
    with pytest.raises(ConfigError, match=rf"a/metrics\.jsonl: rollout/num_elements={size} .* step 1 .* 1$"):
        read_run(folder)


def test_of_damaged_files_the_page_tells(tmp_path):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "reward/mean": "high"}\n')
    (folder / "log_probs").mkdir()
    (folder / "log_probs" / "step_000001.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning, match=r"a/metrics\.jsonl: |^1 of 1 "):
        run = read_run(folder)
    lines, steps = run.notes
    assert lines.startswith(f"{folder / 'metrics.jsonl'}: left out 1")
    assert steps.startswith("1 of 1")
    assert not run.dumped


def test_if_no_record_is_left_the_first_line_is_named(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text("step,reward\n1,0.5\n")
    with pytest.raises(ConfigError, match=r"a/metrics\.jsonl: .* line 1: 'step,reward' "):
        read_run(folder)


@pytest.mark.parametrize(
    "error", ["{", '{"kind": ["end"]}', '{"kind": "failure", "error": {"a": 1}}', '{"a": ' * 10**5]
)
def test_events_of_another_form(error, tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "events.jsonl").write_text(f"{error}\n")
    ending = read_run(folder).ending
    assert not ending or "step None: {'a': 1}" in ending


def test_a_folder_is_named_though_its_name_is_no_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"steps\xff")
    assert read_run(write_run(folder)).name == "steps\ufffd"
