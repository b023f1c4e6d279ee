"""Functions of other projects, read from their files before and after a fix, as parts of `our_loop`."""

from __future__ import annotations

import ast
import asyncio
import builtins
import collections
import contextlib
import dataclasses
import math
import os
import re
import subprocess
import textwrap
import zipfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from integrations.real_bugs import our_loop
from integrations.real_bugs.our_loop import GROUP, LEVEL, NUM_STEPS, PROMPTS, Parts
from peft import get_peft_model_state_dict, set_peft_model_state_dict

OWN_SHIFT = 1.0
"""Of the tiny model's scheduler."""


class _Anything(dict):
    """Names of a module that nobody calls here."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return mock.MagicMock(name=name)


def taken(text: str, name: str, **names: Any) -> Any:
    """A function or class of a module's text, with these names around it."""
    found = [node for node in ast.parse(text).body if getattr(node, "name", None) == name]
    assert found, name
    node = found[0]
    node.decorator_list = []
    scope: dict[str, Any] = _Anything(
        torch=torch, math=math, asyncio=asyncio, contextmanager=contextlib.contextmanager, **names
    )
    lines = ast.unparse(node)
    exec(compile(f"from __future__ import annotations\n{lines}", name, "exec"), scope)
    return scope[name]


# miles_diffusion
def repeated_noise(text: str) -> Parts:
    """Seeds of `generate_and_rm_group`; the engine gives the images of a request `seed`, `seed + 1`, ..."""
    args = Namespace(
        rollout_seed=42,
        n_samples_per_prompt=GROUP,
        diffusion_microgroup_size=GROUP,
        group_rm=False,
        sglang_server_concurrency=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        sglang_dp_size=1,
    )
    asked: list[int] = []

    async def microgroup(args, group, params, evaluation):
        asked.extend(params["seed"] + row for row in range(len(group)))
        return group

    names = {"SingletonMeta": type, "generate_and_rm_microgroup": microgroup, "getattr": getattr}
    names["GenerateState"] = taken(text, "GenerateState", **names)
    generate = taken(text, "generate_and_rm_group", **names)

    def seeds(step: int) -> list[int]:
        asked.clear()
        for number in range(len(PROMPTS)):
            group = [SimpleNamespace(group_index=step * len(PROMPTS) + number) for _ in range(GROUP)]
            asyncio.run(generate(args, group, {}))
        by_group = [asked[number * GROUP :][:GROUP] for number in range(len(PROMPTS))]
        return [by_group[row % len(PROMPTS)][row // len(PROMPTS)] for row in range(len(asked))]

    return Parts(seeds=seeds)


def negative_offset(text: str) -> Parts:
    """The trainer's conditioning by `_tile_collated_cond`, in tiles of two samples."""
    tile = taken(text, "_tile_collated_cond")
    named = (
        "tile_sample_count" in tile.__kwdefaults__
        if tile.__kwdefaults__
        else "tile_sample_count" in tile.__code__.co_varnames
    )

    def conditioned(condition):
        count, size = len(PROMPTS) * GROUP, 2
        halves = []
        for start in range(0, count, size):
            extra = {"tile_sample_count": size} if named else {"local_batch_size": count}
            halves.append(
                tile(
                    condition,
                    sample_indices=torch.arange(start, start + size),
                    tile_tstep_count=1,
                    use_cfg=True,
                    **extra,
                )
            )
        return {
            name: torch.cat(
                [*(positive[name] for positive, _ in halves), *(negative[name] for _, negative in halves)]
            )
            for name in condition
        }

    return Parts(trained_condition=conditioned)


def no_tensor_synced(text: str) -> Parts:
    """Weights that the updater sends; the engine takes those whose name it has."""

    class Base:
        def __init__(self, args, model):
            self.args, self.model, self.weight_version, self.sent = args, model, 0, []

        def wait_and_update_bucket_weights(self, bucket):
            self.sent += bucket

    updater = taken(
        text,
        "DiffusionUpdateWeightFromTensorLoRA",
        DiffusionUpdateWeightFromTensor=Base,
        DTensor=(),
        Replicate=None,
        os=__import__("os"),
        hashlib=__import__("hashlib"),
    )
    updater.__init__.__globals__["super"] = super

    def sync(engine, trainer):
        with mock.patch.object(torch.Tensor, "cuda", lambda self: self):
            made = updater(Namespace(update_weight_buffer_size=1 << 40), trainer)
            made.update_weights()
        own = dict(engine.named_parameters())
        for name, value in made.sent:
            if name in own:
                own[name].copy_(value)

    return Parts(sync=sync)


def noise_level_key(text: str) -> Parts:
    """The line with which the trainer reads its noise level."""
    line = re.search(r"^ +noise_level = (float\(getattr\(self\.args.*)$", text, re.M)[1]
    return Parts(
        trained_level=eval(line, {"self": SimpleNamespace(args=Namespace(diffusion_noise_level=LEVEL))})
    )


def bfloat16_inputs(text: str) -> Parts:
    """The line that says to which dtype the trainer casts its inputs."""
    line = re.search(r"^ +_dt = (.*)$", text, re.M)[1]
    dtype = eval(line, {"torch": torch, "self": SimpleNamespace(_compute_dtype=torch.float32)})
    return Parts(trained_dtype=dtype)


def one_mean_for_all(text: str) -> Parts:
    """Advantages by the method that normalises rewards, with the option documented as flow_grpo's."""
    node = next(
        item for item in ast.walk(ast.parse(text)) if getattr(item, "name", "") == "_post_process_rewards"
    )
    scope: dict[str, Any] = _Anything(torch=torch)
    exec(compile("from __future__ import annotations\n" + ast.unparse(node), "rewards", "exec"), scope)
    args = mock.MagicMock()
    args.rewards_normalization = args.grpo_std_normalization = True
    args.globalize_reward_norm, args.globalize_reward_mean, args.globalize_reward_std = True, False, True
    args.n_samples_per_prompt, args.rollout_batch_size = GROUP, len(PROMPTS)
    args.custom_reward_post_process_path = None
    trainer = SimpleNamespace(args=args, custom_reward_post_process_func=None)

    def advantages(rewards, groups):
        order = groups.argsort(stable=True)
        samples = [
            SimpleNamespace(get_reward_value=lambda args, value=value: value)
            for value in rewards[order].tolist()
        ]
        _, normalised = scope["_post_process_rewards"](trainer, samples)
        made = torch.empty_like(rewards)
        made[order] = torch.tensor(normalised)
        return made

    return Parts(advantages=advantages)


# DanceGRPO
def normaliser_lost(text: str) -> Parts:
    """`flux_step` samples and scores."""
    step = taken(text, "flux_step")

    def transition(velocity, latents, sigma, sigma_next, level, seeds, given):
        if given is None:
            drawn = iter([our_loop.noise_of(latents, seeds)])
            with mock.patch.object(torch, "randn_like", side_effect=lambda like: next(drawn)):
                following, _, score = step(
                    velocity, latents, level, torch.stack([sigma, sigma_next]), 0, None, True, True
                )
            return following, score
        _, _, score = step(velocity, latents, level, torch.stack([sigma, sigma_next]), 0, given, True, True)
        return given, score

    return Parts(transition=transition, sde_type="dance_sde")


# verl, verl-omni
def base_only(text: str, base_sync_done: bool = True) -> Parts:
    """What `collect_lora_params` hands to a separate rollout; the engine takes base and adapter by their names."""
    collect = taken(
        text,
        "collect_lora_params",
        OrderedDict=collections.OrderedDict,
        fsdp_version=lambda module: 0,
        nullcontext=contextlib.nullcontext,
        get_device_name=lambda: "cpu",
    )

    def sync(engine, trainer):
        if not getattr(engine, "peft_config", None):
            engine.add_adapter(trainer.peft_config["default"])
            for name, value in engine.named_parameters():
                if "lora_B" in name:
                    value.zero_()
        sent = dict(collect(trainer, layered_summon=False, base_sync_done=base_sync_done))
        if adapter := {name: value for name, value in sent.items() if "lora_" in name}:
            set_peft_model_state_dict(engine, adapter)

    return Parts(sync=sync)


def bagel_steps(text: str, adapter: str) -> Parts:
    """The engine samples `num_inference_steps` points as the adapter asks for them, and scores by its own table."""
    shift = taken(text, "bagel_time_shift")
    asked = NUM_STEPS + 1
    if "vllm_omni_num_timesteps(" in adapter:
        asked = taken(text, "vllm_omni_num_timesteps")(asked)

    def table(points):
        return torch.cat([shift(1.0, torch.linspace(1, 0, points, dtype=torch.float32))[:-1], torch.zeros(1)])

    fed = table(asked)

    def schedule(sigmas, timesteps):
        del sigmas, timesteps
        return fed, fed[:-1] * 1000

    def trained(sigmas, timesteps):
        own = table(NUM_STEPS + 1)
        return own, torch.cat([fed[:-1] * 1000, torch.zeros(NUM_STEPS + 1 - asked)])

    return Parts(schedule=schedule, trained_schedule=trained)


# vllm-omni
def adapter_scale(text: str, prefix: str = "", scales: Sequence[float] = (0.5, 1.0)) -> Parts:
    """`DiffusionLoRAManager` activates the adapter at one scale after the other.

    Its names have a prefix before those of the engine's layers.
    """
    manager_class = taken(text, "DiffusionLoRAManager", PackedLoRALayerWeights=(), time=__import__("time"))

    def sync(engine, trainer):
        state = get_peft_model_state_dict(trainer)
        our_loop.load_adapter(engine, trainer)
        manager = manager_class.__new__(manager_class)
        layers = sorted({name.rsplit(".lora_", 1)[0] for name in state})

        class Layer:
            def __init__(self, name):
                self.name = name

            def set_lora(self, index, lora_a, lora_b):
                part = {f"{self.name}.lora_A.weight": lora_a, f"{self.name}.lora_B.weight": lora_b}
                set_peft_model_state_dict(engine, part)

            def reset_lora(self, index):
                self.set_lora(index, *(torch.zeros_like(state[f"{self.name}.lora_{x}.weight"]) for x in "AB"))

        weights = {
            prefix + name: SimpleNamespace(
                lora_a=state[f"{name}.lora_A.weight"], lora_b=state[f"{name}.lora_B.weight"]
            )
            for name in layers
        }
        manager.__dict__.update(
            _registered_adapters={1: SimpleNamespace(get_lora=weights.get)},
            _active_adapter_id=None,
            _adapter_scales={},
            _adapter_access_order=collections.OrderedDict({1: 0.0}),
            _pinned_adapters=set(),
            max_cached_adapters=1,
            _lora_modules={name: Layer(name) for name in layers},
            _max_lora_rank=our_loop.RANK,
            _packed_modules_mapping={},
        )
        request = SimpleNamespace(lora_int_id=1, lora_name="policy", lora_path="")
        for scale in scales:
            manager.set_active_adapter(request, scale)

    return Parts(sync=sync)


# miles_diffusion again: a part of a long method
def own_timesteps(text: str) -> Parts:
    """The lines with which the trainer prepares its scheduler for the steps of a batch."""
    lines = text[text.index("# Prepare scheduler timesteps") :]
    lines = textwrap.dedent("    " * 4 + lines[: lines.index("advantages = torch.clamp(")])

    def trained(sigmas, timesteps):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=OWN_SHIFT)
        scope: dict[str, Any] = {
            "self": SimpleNamespace(
                pipeline=SimpleNamespace(scheduler=scheduler), _logged_rollout_scheduler_alignment=True
            ),
            "timesteps": timesteps[list(our_loop.WINDOW)].expand(2, -1),
            "sigmas": sigmas[our_loop.WINDOW[0] :].expand(2, -1),
            "latents": torch.zeros(2, 1),
        }
        exec(lines, scope)
        count, first = len(our_loop.WINDOW), our_loop.WINDOW[0]
        head = torch.zeros(first)
        return torch.cat([head, scheduler.sigmas[: count + 1]]), torch.cat(
            [head, scope["timesteps"][0][:count]]
        )

    return Parts(trained_schedule=trained)


# UniRL
def dropped_shift(text: str) -> Parts:
    """The options that reach the engine's arguments, of which the shift is one of its pipeline's."""
    node = next(
        item for item in ast.walk(ast.parse(text)) if getattr(item, "name", "") == "build_server_kwargs"
    )
    scope: dict[str, Any] = _Anything(dataclasses=dataclasses)
    exec(compile("from __future__ import annotations\n" + ast.unparse(node), "options", "exec"), scope)
    arguments = dataclasses.make_dataclass("ServerArgs", ["model_path", "num_gpus"])
    config = mock.MagicMock(engine_kwargs={"flow_shift": OWN_SHIFT})
    sent = scope["build_server_kwargs"](config, arguments, model_config=mock.MagicMock())
    return _shifted(sent.get("flow_shift", 7.0))


def _shifted(shift: float) -> Parts:
    def schedule(sigmas, timesteps):
        del timesteps
        even = sigmas / (OWN_SHIFT - (OWN_SHIFT - 1) * sigmas)
        used = shift * even / (1 + (shift - 1) * even)
        return used, used[:-1] * 1000

    return Parts(schedule=schedule, trained_schedule=lambda sigmas, timesteps: (sigmas, timesteps))


# Flow-Factory
def noise_outside(text: str) -> Parts:
    """Noise levels of its scheduler, which draws two of the first four steps."""
    made = taken(
        text,
        "FlowMatchEulerDiscreteSDEScheduler",
        FlowMatchEulerDiscreteScheduler=FlowMatchEulerDiscreteScheduler,
    )

    def levels(timesteps):
        for seed in range(100):
            scheduler = made(
                noise_level=LEVEL, train_steps=[0, 1, 2, 3], num_train_steps=2, seed=seed, shift=OWN_SHIFT
            )
            scheduler.set_timesteps(NUM_STEPS)
            if sorted(scheduler.train_timesteps.tolist()) == list(our_loop.WINDOW):
                return [
                    float(scheduler.get_noise_level_for_timestep(timestep))
                    for timestep in scheduler.timesteps
                ]
        raise AssertionError("no seed draws the window")

    return Parts(levels=levels)


# SGLang
def first_trajectory(text: str, after: bool) -> Parts:
    """A worker merges the outputs of a request, and each image is returned with the merged trajectory.

    `after` merges by sample, as the open fix does.
    """
    node = next(
        item
        for item in ast.walk(ast.parse(text))
        if getattr(item, "name", "") == "_merge_expanded_singletons"
    )
    node.decorator_list = []
    scope: dict[str, Any] = _Anything()
    exec(compile("from __future__ import annotations\n" + ast.unparse(node), "merge", "exec"), scope)

    def returned(values):
        rows = list(range(len(PROMPTS) * GROUP))
        for number in range(len(PROMPTS)) if not after else ():
            own = [row for row in rows if row % len(PROMPTS) == number]
            merged = SimpleNamespace(
                error=None, peak_memory_mb=0, trajectory_timesteps=None, rollout_trajectory_data=None
            )
            for row in own:
                output = SimpleNamespace(
                    error=None, peak_memory_mb=0, trajectory_timesteps=None, rollout_trajectory_data=[row]
                )
                scope["_merge_expanded_singletons"](merged, output)
            for row in own:
                rows[row] = merged.rollout_trajectory_data[0]
        names = ("noise", "latents", "next_latents", "final", "log_probs")
        return values | {name: values[name][rows] for name in names}

    return Parts(returned=returned)


Build = Callable[..., Parts]
PARTS: dict[str, tuple[str, tuple[str, ...], Build]] = {
    "md_repeated_noise": ("MILES_DIFFUSION", ("miles/rollout/sglang_diffusion_rollout.py",), repeated_noise),
    "md_negative_offset": ("MILES_DIFFUSION", ("miles/backends/fsdp_utils/actor.py",), negative_offset),
    "md_no_tensor_synced": (
        "MILES_DIFFUSION",
        ("miles/backends/fsdp_utils/diffusion_update_weight_utils.py",),
        no_tensor_synced,
    ),
    "md_noise_level_key": ("MILES_DIFFUSION", ("miles/backends/fsdp_utils/actor.py",), noise_level_key),
    "md_bfloat16_inputs": ("MILES_DIFFUSION", ("miles/backends/fsdp_utils/actor.py",), bfloat16_inputs),
    "md_one_mean_for_all": ("MILES_DIFFUSION", ("miles/ray/rollout.py",), one_mean_for_all),
    "dg_normaliser_lost": ("DANCE_GRPO", ("fastvideo/train_grpo_flux.py",), normaliser_lost),
    "vo_bagel_steps": (
        "VERL_OMNI",
        tuple(
            f"verl_omni/pipelines/bagel_flow_grpo/{name}.py"
            for name in ("common", "vllm_omni_rollout_adapter")
        ),
        bagel_steps,
    ),
    "vllm_adapter_scale": ("VLLM_OMNI", ("vllm_omni/diffusion/lora/manager.py",), adapter_scale),
    "md_own_timesteps": ("MILES_DIFFUSION", ("miles/backends/fsdp_utils/diffusion_actor.py",), own_timesteps),
    "un_dropped_shift": ("UNIRL", ("unirl/rollout/engine/sglang/config.py",), dropped_shift),
    "ff_noise_outside": (
        "FLOW_FACTORY",
        ("src/flow_factory/scheduler/flow_match_euler_discrete.py",),
        noise_outside,
    ),
    "sg_first_trajectory": (
        "SGLANG",
        ("sglang/multimodal_gen/runtime/managers/gpu_worker.py",),
        first_trajectory,
    ),
    "verl_base_only": ("VERL", ("verl/utils/fsdp_utils.py",), base_only),
}
"""By bug: the environment variable that names where its project is, the files that are read, and the parts."""
RELEASES = {"vllm_adapter_scale": ("vllm_omni-0.14.0-py3-none-any.whl", "vllm_omni-0.16.0-py3-none-any.whl")}
"""By bug: its wheels before and after, in the folder that the environment names."""


def read(name: str, fix: str, after: bool) -> list[str]:
    """The files of a bug at the commit before its fix, or at the fix."""
    variable, files, _ = PARTS[name]
    place = Path(os.environ[variable])
    if name in RELEASES:
        with zipfile.ZipFile(place / RELEASES[name][after]) as wheel:
            return [wheel.read(file).decode() for file in files]
    if name == "un_dropped_shift":  # the fix hands all options on
        show = ["git", "-C", str(place), "show", f"HEAD:{files[0]}"]
        return [subprocess.run(show, capture_output=True, text=True, check=True).stdout]
    if fix == "open":
        return [(place / file).read_text(encoding="utf-8") for file in files]
    commit = fix if after else f"{fix}^"
    show = ["git", "-C", str(place), "show"]
    return [
        subprocess.run([*show, f"{commit}:{file}"], capture_output=True, text=True, check=True).stdout
        for file in files
    ]


def parts_of(name: str, fix: str, after: bool) -> Parts:
    """The loop's parts by the project's own functions."""
    texts = read(name, fix, after)
    build = PARTS[name][2]
    if name == "un_dropped_shift" and after:
        return _shifted(OWN_SHIFT)
    return build(*texts, after) if fix == "open" else build(*texts)
