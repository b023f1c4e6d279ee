"""Faults of a loop of one's own: the cause that the doctor names, and the first line of the audit."""

from pathlib import Path

import pytest

from flowcorr.instruments.audit import audit_folder
from flowcorr.instruments.doctor import examine_dump
from tests.planted.own_loop import DRAWN, EVERY, dump_fault
from tests.shallow import SHALLOW

NAMED = {
    "noise_level": "noise_level",
    "sde_type_dance": "sde_type",
    "sde_type_cps": "sde_type",
    "sigma_max": "sigma_max",
    "adapter_twice": "adapter_scale",
    "adapter_scale": "adapter_scale",
    "shift_of_sampler": "wrong_shift",
    "shift_captured": "wrong_shift",
    "guidance_scale": "guidance_scale",
    "guidance_swapped": "guidance_swapped",
    "negative_empty": "negative_prompt",
    "negative_zeros": "negative_prompt",
    "vae_scaling_missing": "decoder_unscaled",
    "vae_shift_missing": "decoder_unscaled",
    "vae_scaling_twice": "decoder_unscaled",
    "vae_scaling": "decoder_unscaled",
    "timesteps_whole": "timesteps",
    "pooled_of_another": "wrong_prompt",
    "step_noise_large": "noise_scale",
    "step_noise_of_batch": "noise_reused",
    "log_probs_of_next_step": "log_probs_order",
    "log_probs_by_channel": "log_probs_summed",
    "std_without_step": "log_probs_std",
    "images_brighter": "images_changed",
    "images_jpeg": "images_changed",
    "adapter_partial": "adapter_partial",
    "guidance_rescaled": "guidance_rescaled",
    "guidance_late": "guidance_steps",
    "initial_noise_scaled": "initial_noise_scale",
    "latents_clamped": "latents_clamped",
    "noise_outside": "noise_outside",
    "indices_from_one": "step_indices",
    "timesteps_of_fewer_steps": "timesteps",
}
FAST = {
    "noise_level",
    "sigma_max",
    "adapter_twice",
    "shift_of_sampler",
    "guidance_swapped",
    "step_noise_large",
}
FAULTS = {fault.name: fault for fault in EVERY}


def test_the_page_has_each_cause_that_is_named():
    page = (Path(__file__).parent / "results.md").read_text(encoding="utf-8")
    assert [cause for cause in NAMED.values() if f"`{cause}`" not in page] == []


def test_twenty_faults_were_drawn_and_none_is_a_number():
    assert len(DRAWN) == 20
    assert len(FAULTS) == len(EVERY)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.system) for name in NAMED]
)
def test_a_fault_is_named(name, tmp_path):
    fault = FAULTS[name]
    dump_fault(fault, fault.sizes[0], tmp_path)
    assert {*examine_dump(tmp_path, SHALLOW).causes()} == {NAMED[name]}


@pytest.mark.parametrize(
    ("name", "place", "number"),
    [
        ("noise_level", 0, 0.75),
        pytest.param("adapter_scale", 1, 1.1, marks=pytest.mark.system),
        pytest.param("guidance_scale", 1, 3.3, marks=pytest.mark.system),
        pytest.param("guidance_rescaled", 1, 0.25, marks=pytest.mark.system),
    ],
)
def test_the_number_is_named(name, place, number, tmp_path):
    fault = FAULTS[name]
    dump_fault(fault, fault.sizes[place], tmp_path)
    found = [
        one.numbers["fitted"] for one in examine_dump(tmp_path, SHALLOW).findings if "fitted" in one.numbers
    ]
    assert found == [pytest.approx(number, rel=1e-3)]


def test_a_noise_level_near_0_does_not_explain_what_a_coarse_precision_hides(tmp_path):
    dump_fault(FAULTS["adapter_twice"], 0.0, tmp_path, dtype="bfloat16")
    assert {*examine_dump(tmp_path, SHALLOW).causes()} == {"adapter_scale"}


def test_the_audit_of_a_wrong_noise_level_sends_to_the_doctor(tmp_path):
    dump_fault(FAULTS["noise_level"], FAULTS["noise_level"].sizes[0], tmp_path)
    report = audit_folder(tmp_path)
    assert report.fact("joint_nats") == pytest.approx(5.0, rel=0.05)
    assert "flowcorr doctor" in report.verdict
    assert not any(finding.keys or finding.cause == "mode" for finding in report.findings)


@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.system)])
def test_a_clean_loop_is_clean(seed, tmp_path):
    dump_fault(None, 0.0, tmp_path, seed=seed)
    doctor, audited = examine_dump(tmp_path, SHALLOW), audit_folder(tmp_path)
    assert doctor.causes() == doctor.causes("warning") == []
    assert "flowcorr doctor" not in audited.verdict
