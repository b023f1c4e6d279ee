"""A VAE that overflows in the real engine: its samples fail by name, and the doctor names its dtype."""

import gc
from dataclasses import replace

import pytest
import torch
from tiny_pipelines import FAMILIES, build_tiny_sd3

from flowcorr.errors import BackendError
from flowcorr.instruments.doctor import examine
from flowcorr.trainer.step import train_step
from tests.overflow import overflow
from tests.rollout.vllm_omni.test_training import training_run

pytestmark = [pytest.mark.vllm_omni, pytest.mark.filterwarnings("ignore")]


def vae_of(stack):
    """The engine's own VAE: it samples in this process."""
    from flowcorr.rollout.vllm_omni.pipeline import FlowcorrPipeline

    gc.collect()
    (pipeline,) = [found for found in gc.get_objects() if type(found) is FlowcorrPipeline]
    assert pipeline.vae is not stack.family.pipeline.vae
    return pipeline.vae


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_which_images_are_none(start, family, dtype):
    stack = start(family, dtype=dtype)
    assert stack.sample().finite_images.tolist() == [True] * 8
    overflow(vae_of(stack), "conv_out")
    rollout = stack.sample()
    assert rollout.final_latents.isfinite().all()
    assert rollout.finite_images.dtype == torch.bool
    assert rollout.finite_images.tolist() == [False] * 8


def test_a_training_step_and_the_doctor_name_it(start):
    stack = start("sd3")
    overflow(vae_of(stack))
    with pytest.raises(BackendError, match=r"image 0 of group 0: .*pixels.*rollout\.dtype=float32"):
        train_step(training_run(stack), 1, lambda phase: None)
    report = examine(stack.actor, stack.engine, stack.conditioning)
    assert report.causes() == ["finite"]
    (finding,) = [found for found in report.findings if found.cause == "finite"]
    assert "rollout.dtype=float32" in finding.remedy


def test_it_crosses_from_an_engine_in_its_own_process(start, monkeypatch):
    def damaged(path, dtype):
        from diffusers import AutoencoderKL

        folder = build_tiny_sd3(path, dtype)
        vae = AutoencoderKL.from_pretrained(folder, subfolder="vae")
        overflow(vae)
        vae.save_pretrained(folder / "vae")
        return folder

    monkeypatch.setitem(FAMILIES, "sd3", replace(FAMILIES["sd3"], build=damaged))
    rollout = start("sd3", backend="mp").sample()
    assert rollout.final_latents.isfinite().all()
    assert not rollout.finite_images.any()
