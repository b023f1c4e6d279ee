"""The training side of a real verl-omni on one CPU process: its configuration, worker, engine, losses and trainers.

Import it as `verl_omni_on_cpu`, before verl and verl_omni, with the path of a verl-omni source tree in the environment
variable VERL_OMNI. It replaces vllm and vllm-omni, of which nothing runs here, and FSDP's wrapping of the model; its
trainers get a given batch instead of sampling one. The model is flowcorr's embedded SD3 pipeline.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
from integrations.real_loops.engine_stand_in import MODULES

from flowcorr.models import resolve_path

SOURCE = os.environ["VERL_OMNI"]
GROUPS, MEMBERS = 4, 8
_ENGINES, _VERSION = ("vllm", "vllm_omni", "vllm-omni"), "0.27.0"


class _Anything(type):
    """A class whose attributes are empty classes, made when they are asked for."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _Anything(name, (), {}))
        return getattr(cls, name)


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = _VERSION
    __getattr__ = _Anything.__getattr__


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename):
        return f"Name: vllm\nVersion: {_VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


class _Engines(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vllm and vllm-omni with any module and any name in them."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in _ENGINES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):  # noqa: B008
        return [_Distribution()] if context.name in _ENGINES else []

    def create_module(self, spec):
        module = _Module(spec.name)
        if spec.name == "vllm_omni.platforms":
            module.current_omni_platform = SimpleNamespace(device_type="cpu")
        vars(module).update(MODULES.get(spec.name, {}))
        return module

    def exec_module(self, module):
        """There is nothing to run."""


sys.meta_path.insert(0, _Engines())
sys.path.insert(0, SOURCE)
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

# verl-omni, where it finds vllm, writes a file into site-packages.
with warnings.catch_warnings(), mock.patch("site.getsitepackages", return_value=[]):
    warnings.simplefilter("ignore")
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    class _CPU(PlatformCUDA):
        device_name = "cpu"
        device_module = torch.cpu

        def is_available(self):
            return True

        def current_device(self):
            return "cpu"

        def set_device(self, index):
            """There is one."""

    set_platform(_CPU())  # modules of verl-omni ask for it as they are imported
    import verl_omni
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.workers.engine.base import EngineRegistry
    from verl_omni.trainer.diffusion.v1 import tq_utils, trainer_base
    from verl_omni.workers import engine_workers
    from verl_omni.workers.engine.fsdp.diffusers_impl import PPODiffusersFSDPEngine

engine_workers.aggressive_empty_cache = lambda **_: None  # asks a GPU


@EngineRegistry.register(model_type="diffusion_model", backend=["fsdp", "fsdp2"], device="cpu")
class _Engine(PPODiffusersFSDPEngine):
    def _build_fsdp_module(self, module):
        return module

    def initialize(self):
        # All that the engine's own `initialize` does beside asking a GPU.
        self._build_model_optimizer()

    def to(self, *args, **kwargs):
        """Everything is on the CPU."""


def config(**overrides):
    """verl-omni's Hydra configuration for the embedded model; `a__b=c` sets `a.b`."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    values = {
        "actor_rollout_ref.model.path": resolve_path("tiny_ocr"),
        "actor_rollout_ref.model.attn_backend": "native",
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.lora_alpha": 16,
        "actor_rollout_ref.model.target_modules": "[to_q,to_k,to_v]",
        f"{rollout}.name": "vllm_omni",
        f"{rollout}.n": MEMBERS,
        f"{rollout}.calculate_log_probs": "true",
        f"{rollout}.pipeline.height": 32,
        f"{rollout}.pipeline.width": 64,
        f"{rollout}.pipeline.num_inference_steps": 10,
        f"{rollout}.algo.noise_level": 0.7,
        f"{rollout}.algo.sde_window_size": 2,
        f"{rollout}.algo.sde_window_range": "[0,4]",
        f"{actor}.ppo_mini_batch_size": 2,
        f"{actor}.ppo_micro_batch_size_per_gpu": 8,
        f"{actor}.optim.lr": 1e-3,
        f"{actor}.optim.total_training_steps": 10,
        f"{actor}.diffusion_loss.clip_ratio": 1e-3,
        f"{actor}.fsdp_config.model_dtype": "fp32",
        f"{actor}.fsdp_config.fsdp_size": 1,
        "algorithm.rollout_correction.rollout_is": "null",
        "algorithm.rollout_correction.rollout_rs": "null",
        "data.train_batch_size": GROUPS,
        "trainer.use_v1": "true",
        "trainer.device": "cpu",
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    folder = os.path.join(os.path.dirname(verl_omni.__file__), "trainer", "config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        composed = compose("diffusion_trainer", overrides=[f"{key}={value}" for key, value in values.items()])
    OmegaConf.resolve(composed)
    return composed


def worker(settings):
    """Its actor, with a new adapter on the embedded model."""
    torch.manual_seed(0)
    actor = engine_workers.ActorRolloutRefWorker(config=settings.actor_rollout_ref, role="actor")
    actor.init_model()
    return actor


def adapter(actor):
    """The trained weights."""
    return {
        name: value.detach().clone()
        for name, value in actor.actor.engine.module.named_parameters()
        if "lora" in name
    }


def trainer(cls, settings, actor):
    """A trainer of class `cls` around one worker, without Ray."""
    made = cls.__new__(cls)
    made.config, made.actor_rollout_wg, made.global_steps = settings, actor, 1
    made.use_reference_policy = made.use_rm = False
    made.tokenizer = SimpleNamespace(pad_token_id=0)
    made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[object()])
    return made


def step(made, data, monkeypatch):
    """One step of a v1 trainer on the batch `data`: its metrics, and the batch as the step left it.

    Its public `fit` needs the queues of a Ray cluster; the private step is what `fit` calls.
    """
    batch = SimpleNamespace(keys=[str(place) for place in range(len(data))])
    left = {}
    monkeypatch.setattr(made, "_sample_training_batch", lambda size: (batch, {}), raising=False)
    monkeypatch.setattr(made, "on_sample_begin", lambda: None, raising=False)
    monkeypatch.setattr(made, "on_sample_end", lambda: None, raising=False)
    monkeypatch.setattr(trainer_base, "diffusion_tq_batch_to_dataproto", lambda *_, **__: data)
    monkeypatch.setattr(
        tq_utils, "put_dataproto_fields_to_tq", lambda meta, data, fields: left.update(data=data)
    )
    metrics = {}
    made._step_once(metrics, {}, GROUPS)
    return metrics, left["data"]
