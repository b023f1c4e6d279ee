"""Bugs of the second list as parts of `our_loop`; each by a function of whether its fix is in."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from integrations.real_bugs import our_loop
from integrations.real_bugs.functions import adapter_scale, taken
from integrations.real_bugs.our_loop import ALPHA, GROUP, NUM_STEPS, PROMPTS, RANK, TARGETS, Parts
from peft import get_peft_model_state_dict

SHIFT = {"shift": 3.0}
"""That of Stable Diffusion 3; the tiny model's own is 1."""
ROWS = len(PROMPTS) * GROUP


def shown(variable: str, commit: str, file: str) -> str:
    """A file of a git clone that the environment names, at a commit."""
    command = ["git", "-C", os.environ[variable], "show", f"{commit}:{file}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def chunk_seeds(after: bool) -> Parts:
    """Two workers of `DiffusionAgentLoopWorkerTQ` make the seeds of one prompt each."""
    folder = "verl_omni/agent_loop"
    derive = taken(shown("VERL_OMNI", "a1139baf", f"{folder}/utils.py"), "_derive_rollout_seed")
    tree = ast.parse(shown("VERL_OMNI", "a1139baf", f"{folder}/diffusion_agent_loop_tq.py"))
    run = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "_run_prompt")
    scope: dict[str, Any] = {
        "asyncio": asyncio,
        "tq": SimpleNamespace(async_kv_put=mock.AsyncMock()),
        "logger": mock.MagicMock(),
        "_derive_rollout_seed": derive,
    }
    exec(compile("from __future__ import annotations\n" + ast.unparse(run), "prompt", "exec"), scope)

    def seeds(step: int) -> list[int]:
        asked: list[list[int]] = [[] for _ in PROMPTS]
        for number in range(len(PROMPTS)):

            async def sampled(params, number=number, **kwargs):
                asked[number].append(params["seed"])

            worker = SimpleNamespace(rollout_config=SimpleNamespace(n=GROUP), _run_agent_loop=sampled)
            place = number if after else 0
            asyncio.run(scope["_run_prompt"](worker, {"uid": "0"}, {}, {"validate": False}, place, step + 42))
        return [asked[row % len(PROMPTS)][row // len(PROMPTS)] for row in range(ROWS)]

    return Parts(seeds=seeds)


def terminal_stretch(after: bool) -> Parts:
    """The sigmas that the engine's scheduler makes of the trainer's, with Qwen-Image's `shift_terminal`."""
    file = "unirl/rollout/engine/vllm_omni_v2/pipelines/_shared/flow_match_sde_scheduler.py"
    made = taken(
        shown("UNIRL", "8abaac9" if after else "8abaac9^", file),
        "FlowMatchSDEDiscreteScheduler",
        FlowMatchEulerDiscreteScheduler=FlowMatchEulerDiscreteScheduler,
    )

    def schedule(sigmas, timesteps):
        del timesteps
        scheduler = made(shift_terminal=0.02)
        scheduler.set_timesteps(sigmas=sigmas[:-1].tolist())
        return scheduler.sigmas, scheduler.timesteps

    return Parts(schedule=schedule, trained_schedule=lambda sigmas, timesteps: (sigmas, timesteps))


def adapter_alpha(after: bool) -> Parts:
    """The engine is given the adapter by the loader of its pipeline, with its alpha or without."""

    def sync(engine, trainer):
        if getattr(engine, "peft_config", None):
            engine.delete_adapters("policy")
        adapter = get_peft_model_state_dict(trainer).items()
        state = {name.replace("base_model.model", "transformer"): value for name, value in adapter}
        config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
        config = {f"transformer.{name}": value for name, value in config.items()} if after else None
        StableDiffusion3Pipeline.load_lora_into_transformer(
            state, engine, adapter_name="policy", metadata=config
        )

    return Parts(sync=sync)


def given_timesteps(after: bool) -> Parts:
    """The engine hands the even timesteps of a schedule to its scheduler, which shifts them."""

    def schedule(sigmas, timesteps):
        scheduler = FlowMatchEulerDiscreteScheduler(**SHIFT)
        even = np.linspace(1000 * scheduler.sigma_max, 1000 * scheduler.sigma_min, NUM_STEPS)
        scheduler.set_timesteps(timesteps=even.astype(np.float32).tolist())
        torch.testing.assert_close(scheduler.sigmas, sigmas)
        return sigmas, timesteps if after else scheduler.timesteps

    return Parts(
        schedule=schedule,
        trained_schedule=lambda sigmas, timesteps: (sigmas, timesteps),
        scheduler=SHIFT,
    )


def shift_twice(after: bool) -> Parts:
    """The engine's own formula shifts even sigmas once, where the model's scheduler has shifted their end before."""

    def schedule(sigmas, timesteps):
        if after:
            return sigmas, timesteps
        even = torch.linspace(1, 0.001, NUM_STEPS)
        once = SHIFT["shift"] * even / (1 + (SHIFT["shift"] - 1) * even)
        return torch.cat([once, torch.zeros(1)]), 1000 * once

    return Parts(
        schedule=schedule,
        trained_schedule=lambda sigmas, timesteps: (sigmas, timesteps),
        scheduler=SHIFT,
    )


def one_replica(after: bool) -> Parts:
    """The second of two replicas samples half of the images of each prompt."""
    return Parts(unsynced=() if after else range(ROWS // 2, ROWS))


def pairs_across_prompts(after: bool) -> Parts:
    """The reward is the share of images of its batch that an image beats: of a GPU's, or of its prompt's."""

    def reward(images, prompts: Sequence[str]):
        plain = our_loop.jpeg_sizes(images, prompts)
        batches = [prompt if after else row // GROUP for row, prompt in enumerate(prompts)]
        same = torch.tensor([[one == other for other in batches] for one in batches])
        beaten = (plain[:, None] > plain[None]) & same
        return beaten.sum(1) / (same.sum(1) - 1)

    return Parts(reward=reward)


def unbound_names(after: bool) -> Parts:
    """`DiffusionLoRAManager` of vllm-omni looks for an adapter's layers, whose names have a prefix."""
    with zipfile.ZipFile(Path(os.environ["VLLM_OMNI"]) / "vllm_omni-0.14.0-py3-none-any.whl") as wheel:
        text = wheel.read("vllm_omni/diffusion/lora/manager.py").decode()
    return adapter_scale(text, prefix="" if after else "diffusion_model.", scales=(1.0,))


def inpaint_decode(after: bool) -> Parts:
    """The decoder gets latents without their shift."""
    return Parts() if after else Parts(decoded=lambda latents, config: latents / config.scaling_factor)


PARTS: dict[str, Callable[[bool], Parts]] = {
    "vo_chunk_seeds": chunk_seeds,
    "un_terminal_stretch": terminal_stretch,
    "pcm_adapter_alpha": adapter_alpha,
    "df_given_timesteps": given_timesteps,
    "df_shift_twice": shift_twice,
    "sg_one_replica": one_replica,
    "pg_pairs": pairs_across_prompts,
    "vllm_unbound_names": unbound_names,
    "df_inpaint_decode": inpaint_decode,
}
"""By bug, its parts before and after its fix."""
