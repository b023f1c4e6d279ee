"""What verl-omni's rollout of SD3 needs of vllm-omni, on diffusers: requests, their outputs, the base of its pipeline.

The engine itself does not run. verl-omni's own pipeline, derived from this base, samples: its denoising loop, windows,
scheduler, log-probs and decoding.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline as DiffusersPipeline
from diffusers.utils.torch_utils import randn_tensor

_WAIT = 0.05  # seconds for requests that come together


@dataclass
class DiffusionOutput:
    """The outputs of one or more requests."""

    output: Any = None
    trajectory_timesteps: Any = None
    trajectory_latents: Any = None
    trajectory_log_probs: Any = None
    trajectory_decoded: Any = None
    error: Any = None
    error_status_code: Any = None
    error_type: Any = None
    aborted: bool = False
    abort_message: Any = None
    post_process_func: Any = None
    finished: bool = True
    chunk_index: Any = None
    total_chunks: Any = None
    started_event_ids: Any = None
    active_event_ids: Any = None
    completed_event_ids: Any = None
    stage_durations: dict = field(default_factory=dict)
    peak_memory_mb: float = 0.0
    to_cpu: bool = False


@dataclass
class OmniDiffusionSamplingParams:
    """The parameters of a request."""

    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    seed: int | None = None
    generator: Any = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    sigmas: Any = None
    latents: Any = None
    max_sequence_length: int | None = None
    output_type: str | None = None
    num_outputs_per_prompt: int = 1
    lora_request: Any = None
    extra_args: Any = None

    @property
    def guidance_scale_provided(self):
        return self.guidance_scale is not None


class DiffusionRequestBatch:
    """Requests that are sampled together."""

    def __init__(self, requests):
        self.requests = requests
        self.num_reqs = len(requests)
        self.prompts = [request.prompt for request in requests]
        self.sampling_params_list = [request.sampling_params for request in requests]

    def collate_request_generators(self, count, default):
        return [params.generator for params in self.sampling_params_list for _ in range(count)]

    def collate_request_tensors(self, name, default):
        return default


class StableDiffusion3Pipeline:
    """The base of verl-omni's pipeline."""

    interrupt = False

    def __init__(self, *, od_config, prefix=""):
        self.od_config, self._inner = od_config, DiffusersPipeline.from_pretrained(od_config.model)
        for name, component in self._inner.components.items():
            setattr(self, name, component)
        self.tokenizer_max_length = self._inner.tokenizer_max_length
        self.vae_scale_factor = self._inner.vae_scale_factor
        self.default_sample_size = self._inner.default_sample_size

    def encode_prompt(self, prompt, prompt_2, prompt_3, max_sequence_length, num_images_per_prompt):
        embeds, _, pooled, _ = self._inner.encode_prompt(
            prompt,
            prompt_2,
            prompt_3,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            num_images_per_prompt=num_images_per_prompt,
        )
        return embeds, pooled

    def prepare_latents(self, batch_size, channels, height, width, generator, latents):
        size = (batch_size, channels, height // self.vae_scale_factor, width // self.vae_scale_factor)
        return randn_tensor(size, generator=generator) if latents is None else latents

    def prepare_timesteps(self, num_inference_steps, sigmas, image_seq_len):
        self.scheduler.set_timesteps(num_inference_steps, sigmas=sigmas)
        return self.scheduler.timesteps, num_inference_steps

    def predict_noise_maybe_with_cfg(self, do_cfg, scale, positive, negative, normalize):
        predicted = self.transformer(**positive)[0]
        if not do_cfg:
            return predicted
        other = self.transformer(**negative)[0]
        return other + scale * (predicted - other)


def get_sd3_image_post_process_func(od_config):
    """Pixels from -1..1 to 0..1."""
    return lambda images: (images / 2 + 0.5).clamp(0, 1)


class Engine:
    """Samples requests that come within a short time together, as vllm-omni does, and at most `batch` of them."""

    default_sampling_params_list = [None]  # verl-omni adds a list to it

    def __init__(self, pipeline, postprocess, batch=None):
        self.pipeline, self._postprocess, self._batch, self._waiting = pipeline, postprocess, batch, []

    async def generate(self, prompt, request_id, sampling_params_list):
        request = SimpleNamespace(
            prompt=prompt, request_id=request_id, sampling_params=sampling_params_list[-1]
        )
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((request, done))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().create_task(self._run())
        yield await done

    async def _run(self):
        await asyncio.sleep(_WAIT)
        waiting, self._waiting = self._waiting, []
        size = self._batch or len(waiting)
        for start in range(0, len(waiting), size):
            self._sample(waiting[start : start + size])

    def _sample(self, waiting):
        with torch.no_grad():
            outputs = self.pipeline.forward(DiffusionRequestBatch([request for request, _ in waiting]))
        for (_, done), output in zip(waiting, outputs, strict=True):
            made = self._postprocess(output.output)
            done.set_result(
                SimpleNamespace(
                    images=[made["payload"]["image"][0]],
                    trajectory_latents=output.trajectory_latents,
                    trajectory_timesteps=output.trajectory_timesteps,
                    trajectory_log_probs=output.trajectory_log_probs,
                    multimodal_output={"metadata": made["metadata"]},
                )
            )


MODULES = {
    "vllm_omni.diffusion.data": {"DiffusionOutput": DiffusionOutput},
    "vllm_omni.diffusion.distributed.utils": {"get_local_device": lambda: torch.device("cpu")},
    "vllm_omni.diffusion.models.sd3": {
        "pipeline_sd3": SimpleNamespace(get_sd3_image_post_process_func=get_sd3_image_post_process_func)
    },
    "vllm_omni.diffusion.models.sd3.pipeline_sd3": {
        "StableDiffusion3Pipeline": StableDiffusion3Pipeline,
        "get_sd3_image_post_process_func": get_sd3_image_post_process_func,
    },
    "vllm_omni.diffusion.request": {"DUMMY_DIFFUSION_REQUEST_ID": "dummy"},
    "vllm_omni.diffusion.worker.request_batch": {"DiffusionRequestBatch": DiffusionRequestBatch},
    "vllm_omni.inputs.data": {"OmniDiffusionSamplingParams": OmniDiffusionSamplingParams},
}
"""By module of vllm-omni: what stands there instead."""
