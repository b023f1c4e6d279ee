"""The vllm-omni pipeline that runs the engine's transformer inside flowcorr's sampling loop.

Only vllm-omni imports this module, in its workers. The pipeline holds a transformer and a VAE, but no text encoder:
requests contain the conditioning as the actor encoded it. A second text encoder would cost memory, and its rounding
would add to the gap. Requests also contain the timesteps, rounded as the engine's dtype requires.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.diffusion.models.interface import SupportsComponentDiscovery
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from flowcorr import sde
from flowcorr.devices import keep_float32
from flowcorr.imports import import_target
from flowcorr.models import Guidance, ModelFamily, resolve_family
from flowcorr.rollout.sampler import decode, sample_sde_window
from flowcorr.rollout.vllm_omni.request import (
    CONDITIONING,
    FAMILY,
    LATENTS,
    TIMESTEP,
    Job,
    Plan,
    Probe,
    from_extra,
)


class FlowcorrPipeline(nn.Module, SupportsComponentDiscovery):
    """The pipeline of all families. One request batch may mix plans, groups and windows.

    Attributes:
        family: the flowcorr family of this pipeline; it applies guidance and decodes as the actor does.
        adapters: adapters that `RolloutWorker` put here to be loaded from memory, by id.
    """

    supports_request_batch = True
    dummy_run_num_frames = (
        0  # no warm-up request: it would lack conditioning, and the first probe warms up too
    )
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__()
        keep_float32()
        self.od_config = od_config
        self.device = get_local_device()
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(
                model_or_path=od_config.model, subfolder="transformer", revision=None, prefix="transformer."
            )
        ]
        family = resolve_family((od_config.custom_pipeline_args or {})[FAMILY])
        assert family.vllm_omni is not None, "an engine of a family without one is refused"
        self._call = family.vllm_omni.call
        self.transformer = build_transformer(family, od_config)
        self.vae = (
            _class_of(family, "vae")
            .from_pretrained(
                od_config.model,
                subfolder="vae",
                torch_dtype=od_config.dtype,
                use_safetensors=True,
                local_files_only=os.path.isdir(od_config.model),
            )
            .to(self.device)
        )
        self.family = family(self, dtype=od_config.dtype)
        self.adapters: dict[int, tuple[dict[str, Tensor], dict[str, Any]]] = {}

    def call_transformer(self, **inputs: Any) -> Any:
        """Call the transformer with the arguments of its diffusers equivalent."""
        return self._call(self.transformer, **inputs)

    # Sampling --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One output for each request; samples with equal plans share their forward passes."""
        asked = [from_extra(params.extra_args) for params in req.sampling_params_list]
        outputs: dict[int, DiffusionOutput] = {}
        for place, probe in enumerate(asked):
            if isinstance(probe, Probe):
                outputs[place] = self._probe(probe, req.prompts[place])
        jobs = {place: job for place, job in enumerate(asked) if isinstance(job, Job)}
        for plan in dict.fromkeys(job.plan for job in jobs.values()):
            places = [place for place, job in jobs.items() if job.plan == plan]
            conditioning = self._rows([req.prompts[place][CONDITIONING] for place in places])
            outputs |= zip(
                places, self._sample(plan, [jobs[place] for place in places], conditioning), strict=True
            )
        return [outputs[place] for place in range(len(asked))]

    def _sample(
        self, plan: Plan, jobs: Sequence[Job], conditioning: Mapping[str, Tensor]
    ) -> list[DiffusionOutput]:
        guidance = Guidance.of(plan.sampling)

        def velocity(latents: Tensor, timesteps: Tensor, rows: Tensor | slice) -> Tensor:
            chosen = {name: values[rows] for name, values in conditioning.items()}
            return self.family.velocity(self.call_transformer, latents, timesteps, chosen, guidance)

        def noise(step_index: int, rows: Sequence[int]) -> Tensor:
            drawn = [_noise(sde.step_noise, jobs[row], step_index=step_index) for row in rows]
            return torch.cat(drawn).to(self.device)

        initial = [_noise(sde.initial_noise, job, same_in_group=job.same_initial_noise) for job in jobs]

        window, log_probs, final = sample_sde_window(
            velocity,
            torch.cat(initial).to(self.device),
            plan.schedule,
            plan.sampling,
            torch.tensor([job.window for job in jobs], device=self.device),
            noise,
            with_means=plan.with_means,
        )
        images, finite_images = decode(self.family, final)
        kept = {**window.columns(), "log_probs": log_probs, "final": final, "finite_images": finite_images}
        return [
            _output(
                images[row],
                {name: values[row] for name, values in kept.items()} | {"policy_version": job.policy_version},
            )
            for row, job in enumerate(jobs)
        ]

    def _probe(self, probe: Probe, prompt: Mapping[str, Any]) -> DiffusionOutput:
        guidance = Guidance(guidance_scale=probe.guidance_scale, true_cfg_scale=probe.true_cfg_scale)
        latents = prompt[LATENTS].to(self.device)[None]
        velocity = self.family.velocity(
            self.call_transformer,
            latents,
            latents.new_tensor([prompt[TIMESTEP]]),
            self._rows([prompt[CONDITIONING]]),
            guidance,
        )
        return _output(velocity, {"velocity": velocity[0]})

    def _rows(self, conditioning: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The samples' conditioning as a batch, on the device and in the engine's dtype."""
        dtype = self.od_config.dtype
        stacked = {name: torch.stack([row[name] for row in conditioning]) for name in conditioning[0]}
        return {
            name: rows.to(self.device, dtype if rows.is_floating_point() else None)
            for name, rows in stacked.items()
        }

    # Weights ---------------------------------------------------------------------------------------------

    def load_weights(self, weights: Any) -> set[str]:
        """Load tensors named as in diffusers, with the component as prefix."""
        from vllm.model_executor.models.utils import AutoWeightsLoader

        with contextlib.redirect_stderr(io.StringIO()):  # hides vLLM's progress bar
            return AutoWeightsLoader(self).load_weights(weights)

    def _load_diffusion_lora_adapter(
        self, *, lora_request: Any, lora_path: str, dtype: torch.dtype
    ) -> tuple[LoRAModel, PEFTHelper] | None:
        """Called by vllm-omni: the adapter from memory, or None to read it from its path."""
        waiting = self.adapters.pop(lora_request.lora_int_id, None)
        if waiting is None:
            return None
        tensors, config = waiting
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # vllm-omni scales them in place
        helper = PEFTHelper.from_dict(config)
        model = LoRAModel.from_lora_tensors(
            lora_model_id=lora_request.lora_int_id,
            tensors=tensors,
            peft_helper=helper,
            device="cpu",
            dtype=dtype,
        )
        return model, helper


def build_transformer(family: type[ModelFamily], od_config: OmniDiffusionConfig) -> nn.Module:
    """The engine's transformer of a family; vllm-omni loads the weights afterwards."""
    kind = _class_of(family, "transformer")
    arguments = {"od_config": od_config, "quant_config": od_config.quantization_config}
    accepted = inspect.signature(kind).parameters
    transformer = kind(
        **{name: value for name, value in arguments.items() if name in accepted},
        **get_transformer_config_kwargs(od_config.tf_model_config, kind),
    )
    if not hasattr(transformer, "config"):
        transformer.config = od_config.tf_model_config  # a family may read it, as in diffusers
    if not hasattr(transformer, "stacked_params_mapping"):
        # vllm-omni reads the parts of its fused layers from this attribute, which not every transformer has.
        packed = getattr(transformer, "packed_modules_mapping", {})
        transformer.stacked_params_mapping = [
            (fused, part, "") for fused, parts in packed.items() for part in parts
        ]
    return transformer


def _class_of(family: type[ModelFamily], part: str) -> Any:
    key = f"{family.__name__}.vllm_omni.{part}"
    return import_target(key, getattr(family.vllm_omni, part), "a class of vllm-omni or diffusers")


def _noise(draw: Callable[..., Tensor], job: Job, **options: Any) -> Tensor:
    """The noise `[1, *L]` of a sample, by a function of `sde`."""
    ids, seeds = ([job.group], [job.member]), {"seed": job.seed, "training_step": job.training_step}
    return draw(job.plan.latent_shape, *ids, **seeds, **options)


def _output(image: Tensor, trajectory: dict[str, Any]) -> DiffusionOutput:
    return DiffusionOutput(output={"payload": {"image": image, "trajectory": trajectory}}, to_cpu=True)
