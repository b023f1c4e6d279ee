"""The replay of a plain loop's samples: each planted fault by its name, none in clean runs."""

import json
import shutil

import pytest
from instruments.doctor.plain_loop import Loop, dump_steps

from flowcorr.errors import ConfigError
from flowcorr.instruments.doctor import examine_dump
from flowcorr.instruments.doctor.checks.schedule import UNLESS_MEANT
from flowcorr.instruments.page import exit_code
from flowcorr.models import resolve_path
from tests.shallow import SHALLOW

FAULTS = {
    "stale_prompts": ("wrong_prompt", "embeddings"),
    "guidance_off": ("guidance_off", "guidance"),
    "adapter_off": ("adapter_not_applied", "lora"),
    "half_sigma": ("rounded_sigmas", "schedule"),
    "rounded_timesteps": ("rounded_timesteps", "schedule"),
    "wrong_shift": ("wrong_shift", "schedule"),
    "other_schedule": ("other_schedule", "schedule"),
    "summed": ("log_probs_summed", "log_probs"),
    "noise_reused": ("noise_reused", "noise"),
    "swapped_images": ("swapped_images", "images"),
    "images_of_step_before": ("images_of_step_before", "images"),
    "decoder_unscaled": ("decoder_unscaled", "images"),
    "red_and_blue": ("channels_reversed", "images"),
    "not_centred": ("advantages_not_centred", "advantages"),
}
IN_THE_MIDDLE = ("stale_prompts", "guidance_off", "adapter_off")


def by_check(report):
    return {finding.numbers.get("check", finding.cause): finding for finding in report.findings}


@pytest.mark.parametrize(
    ("fault", "window"),
    [
        *((fault, "whole") for fault in FAULTS),
        *(pytest.param(fault, "middle", marks=pytest.mark.system) for fault in IN_THE_MIDDLE),
    ],
)
def test_a_planted_fault_is_named(fault, window, tmp_path):
    steps = 2 if fault == "images_of_step_before" else 1
    report = examine_dump(dump_steps(tmp_path, fault, window=window, steps=steps), SHALLOW)
    cause, check = FAULTS[fault]
    assert set(report.causes()) == {cause}
    assert exit_code(report) == 2
    assert by_check(report)[check].cause == cause
    assert report.findings[0].remedy


@pytest.mark.parametrize("window", ["whole", pytest.param("middle", marks=pytest.mark.system)])
def test_a_clean_run_is_clean(window, tmp_path):
    report = examine_dump(dump_steps(tmp_path, seed=1, window=window, steps=2), SHALLOW)
    assert (report.causes(), exit_code(report), report.fact("steps")) == ([], 0, [0, 1])
    found = {check: finding.level for check, finding in by_check(report).items()}
    assert found.pop("reward") == "note"
    assert set(found.values()) == {"healthy"}


LONGER = {"window": "middle", "num_steps": 8, "places": [0, 1, 2, 3, 4, 6, 8]}


def test_longer_steps_after_the_window_are_replayed_as_they_were_taken(tmp_path):
    report = examine_dump(dump_steps(tmp_path, seed=1, **LONGER), SHALLOW)
    assert (report.causes(), exit_code(report)) == ([], 0)
    untold = dump_steps(tmp_path / "untold", seed=1, without=("sigma_indices",), **LONGER)
    assert examine_dump(untold, SHALLOW).causes() == ["other_schedule"]


def test_a_wrong_shift_of_longer_steps_is_named(tmp_path):
    report = examine_dump(dump_steps(tmp_path, "wrong_shift", **LONGER), SHALLOW)
    assert set(report.causes()) == {"wrong_shift"}


def test_a_schedule_of_ones_own_hides_no_fault_of_its_timesteps(tmp_path):
    """Both are told, and the verdict says which of them may be a choice."""
    fed = Loop("wrong_shift").sample()["timesteps"]
    folder = dump_steps(tmp_path, "wrong_shift", changes={"timesteps": fed / 1000})
    report = examine_dump(folder, SHALLOW)
    assert set(report.causes()) == {"wrong_shift", "timesteps"}
    about = [finding for finding in report.findings if finding.level == "serious" and finding.remedy]
    assert {finding.cause for finding in about} == {"wrong_shift", "timesteps"}
    choices = {finding.cause: finding.numbers["confidence"] == UNLESS_MEANT for finding in about}
    assert choices == {"wrong_shift": True, "timesteps": False}
    assert report.verdict.count(UNLESS_MEANT) == 1


def test_a_schedule_that_the_models_scheduler_has_is_no_fault(tmp_path):
    """The way to say that a shift of one's own is meant."""
    model = tmp_path / "model"
    shutil.copytree(resolve_path(SHALLOW), model)
    file = model / "scheduler" / "scheduler_config.json"
    folder = dump_steps(tmp_path / "dump", "wrong_shift")
    (found,) = (one for one in examine_dump(folder, SHALLOW).findings if one.cause == "wrong_shift")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": found.numbers["fitted"]}))
    report = examine_dump(folder, str(model))
    assert (report.causes(), exit_code(report)) == ([], 0)


def test_of_many_steps_a_few_are_replayed(tmp_path):
    report = examine_dump(dump_steps(tmp_path, steps=5, without=("latents", "next_latents")), SHALLOW)
    assert report.fact("steps") == [0, 2, 4]
    absent = [finding.sentence for finding in report.findings if finding.cause == "files"]
    assert [line.startswith("not captured: latents;") for line in absent] == [True]


# Where nothing can be told, nothing is said -------------------------------------------------------------------------


def test_an_adapter_that_is_still_0_cannot_be_told(tmp_path):
    report = examine_dump(dump_steps(tmp_path, "adapter_off", trained=False), SHALLOW)
    assert report.causes() == []
    found = by_check(report)["lora"]
    assert (found.level, found.numbers["adapter_is_zero"]) == ("note", True)


def test_images_of_samples_that_were_not_captured_cannot_be_told(tmp_path):
    report = examine_dump(dump_steps(tmp_path, "swapped_with_others"), SHALLOW)
    assert (report.causes(), exit_code(report)) == ([], 1)
    assert by_check(report)["images"].level == "warning"


def test_a_fault_below_the_runs_precision_is_not_named(tmp_path):
    report = examine_dump(dump_steps(tmp_path, "half_sigma", changes={"dtype": "bfloat16"}), SHALLOW)
    assert (report.causes(), exit_code(report)) == ([], 0)


@pytest.mark.system
def test_a_run_without_its_dtype_is_judged_as_bfloat16(tmp_path):
    report = examine_dump(dump_steps(tmp_path, "guidance_off", without=("dtype",)), SHALLOW)
    assert set(report.causes()) == {"guidance_off"}


def test_two_faults_of_one_leg_are_not_given_one_name(tmp_path):
    """Neither undone alone makes the replay agree."""
    folder = dump_steps(tmp_path, "guidance_off", changes={"noise_level": 0.8})
    report = examine_dump(folder, SHALLOW)
    assert (report.causes(), exit_code(report)) == ([], 1)
    assert by_check(report)["log_probs"].level == "warning"


BARE = {
    "negative_prompt",
    "guidance_scale",
    "sigmas",
    "timesteps",
    "noise_level",
    "latents",
    "next_latents",
    "log_probs",
    "step_indices",
    "final_latents",
    "rewards",
    "adapter",
    "adapter_alpha",
    "dtype",
}


@pytest.mark.parametrize(
    "without", [BARE, {"latents", "next_latents"}, {"log_probs"}, {"guidance_scale"}, {"sigmas"}]
)
def test_what_was_not_captured_is_not_judged(without, tmp_path):
    report = examine_dump(dump_steps(tmp_path, without=without), SHALLOW)
    assert (report.causes(), exit_code(report)) == ([], 0)
    if without == BARE:
        told = {check for check, finding in by_check(report).items() if finding.level == "healthy"}
        assert told - {"advantages"} == {"noise"}


def test_a_folder_without_samples_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=rf"^{tmp_path} .*\(replay_000000\.safetensors\)"):
        examine_dump(tmp_path, SHALLOW)


def test_samples_of_another_model_are_refused(tmp_path):
    changes = {"initial_noise": [[0.0] * 7] * 8}
    folder = dump_steps(tmp_path, changes=changes, without=("latents", "next_latents", "final_latents"))
    with pytest.raises(ConfigError, match="initial_noise have 7 .* 128 .* 16 x 32:"):
        examine_dump(folder, SHALLOW)
