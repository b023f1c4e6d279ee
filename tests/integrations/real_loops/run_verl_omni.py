"""Run verl-omni's own rollout, rewards and trainer step on a CPU, on a copy of its source.

The copy has a fault, and the lines of the example.

    WORK=... VERL_OMNI=... python run_verl_omni.py FOLDER STEPS FAULT SEED     # FAULT: a key of FAULTS, or clean

WORK holds `model` and `prompts`; the dump is written to FOLDER, the copy to FOLDER-source. verl-omni's own code, in its
own order: agent loop, server (of which the engine is left out), SD3 pipeline with its scheduler, reward manager, and
`_step_once` of the v1 trainer with its workers, losses and optimizer. From outside comes what needs vllm-omni's engine,
Ray or a GPU: `engine_stand_in`, the transfer of batches, and the update of the rollout's weights.
"""

import asyncio
import os
import shutil
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]
sys.path.append(str(HERE.parents[2] / "examples"))

from integrations.real_loops.change import changed  # noqa: E402
from integrations.real_loops.planted_verl_omni import DUMP, FAULTS, FILES  # noqa: E402

GROUP = 4  # images a prompt
CLIP, T5 = 77, 32  # text tokens


def copy_source(folder, fault):
    """A copy with the fault and the lines of the example; it becomes the source that is imported."""
    source = Path(f"{folder}-source")
    shutil.copytree(Path(os.environ["VERL_OMNI"]) / "verl_omni", source / "verl_omni")
    for name, *change in (*([FAULTS[fault][1]] if fault in FAULTS else ()), *DUMP):
        path = source / "verl_omni" / FILES[name]
        path.write_text(changed(path.read_text(encoding="utf-8"), *change), encoding="utf-8")
    os.environ.update(VERL_OMNI=str(source), DUMP=folder)


def settings_of(omni, model, clip, t5, overrides):
    """Its configuration for a tiny SD3 in `model`, in float32 with guidance; `clip` and `t5` are text tokens."""
    from omegaconf import OmegaConf, open_dict

    rollout, actor = "actor_rollout_ref__rollout", "actor_rollout_ref__actor"
    made = omni.config(
        actor_rollout_ref__model__path=model,
        **{
            f"{rollout}__dtype": "float32",
            f"{rollout}__max_prompt_embed_length": clip + t5,
            f"{rollout}__prompt_length": clip,
            f"{rollout}__pipeline__height": 64,
            f"{rollout}__pipeline__width": 64,
            f"{rollout}__pipeline__guidance_scale": 4.5,
            f"{rollout}__pipeline__max_sequence_length": t5,
            f"{actor}__fsdp_config__dtype": "float32",
        }
        | overrides,
    )
    tokenizers = {
        "clip": {"path": "tokenizer", "max_length": clip},
        "t5": {"path": "tokenizer_3", "max_length": t5},
    }
    with open_dict(made):
        made.actor_rollout_ref.model.extra_tokenizers = OmegaConf.create(tokenizers)
        made.actor_rollout_ref.model.custom_chat_template = "{{ messages[0]['content'] }}"
        made.actor_rollout_ref.model.tokenizer_path = str(model / "tokenizer")
    return made


def server_of(settings, batch):
    """verl-omni's server around its own pipeline, without the processes of an engine."""
    from integrations.real_loops.engine_stand_in import Engine

    transforms = types.ModuleType("torchvision.transforms")
    with mock.patch.dict(
        sys.modules, {transforms.__name__: transforms, "torchvision": SimpleNamespace(transforms=transforms)}
    ):
        from verl_omni.workers.rollout.vllm_rollout.vllm_omni_async_server import vLLMOmniHttpServer
    import torch
    from verl_omni.pipelines.sd3_flow_grpo import vllm_omni_rollout_adapter as sd3

    described = SimpleNamespace(model=str(settings.actor_rollout_ref.model.path), dtype=torch.float32)
    pipeline = sd3.StableDiffusion3PipelineWithLogProb(od_config=described)

    class Server(vLLMOmniHttpServer):
        lora_as_adapter = False  # the pipeline holds the adapter

    server = Server.__new__(Server)
    server._ar_mode, server.global_steps = False, 0
    server.engine = Engine(pipeline, sd3.get_latent_post_process_func(described), batch)
    return server


def sync(actor, transformer):
    """Give the rollout the adapter that the actor trains, as verl-omni does after each step."""
    import torch
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    module = actor.actor.engine.module
    if not getattr(transformer, "peft_config", None):
        transformer.add_adapter(module.peft_config["default"])
    state = get_peft_model_state_dict(module)
    with torch.no_grad():
        set_peft_model_state_dict(transformer, state)
    return state


class Loop:
    """Its agent loop, server, reward manager and v1 trainer in this process.

    Args:
        omni: the module `verl_omni_on_cpu`.
        settings: of `settings_of`.
        batch: images that the server samples together at most.

    Attributes:
        trainer: verl-omni's, around one worker.
    """

    def __init__(self, omni, settings, batch=None):
        import torch

        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        from verl_omni.agent_loop.diffusion_agent_loop import DiffusionAgentLoopWorker
        from verl_omni.reward_loop.reward_manager.visual import VisualRewardManager
        from verl_omni.trainer.diffusion.v1 import PolicyGradientDiffusionTrainerV1Sync

        self._omni, self._settings = omni, settings
        self._actor, self._server = omni.worker(settings), server_of(settings, batch)
        self.trainer = omni.trainer(PolicyGradientDiffusionTrainerV1Sync, settings, self._actor)

        async def score(data):
            return await VisualRewardManager(settings, None, None).run_single(data)

        handle = SimpleNamespace(compute_score=SimpleNamespace(remote=score))
        self._agents = DiffusionAgentLoopWorker(settings, self._server, reward_loop_worker_handles=[handle])

    def begin(self, step):
        """Give the rollout the trained weights."""
        self.trainer.global_steps = step
        self.trainer.adapter = sync(self._actor, self._server.engine.pipeline.transformer)

    def sample(self, prompts, seed):
        """A batch of the step, sampled and scored by verl-omni's agent loop."""
        from verl import DataProto

        repeated = prompts * self._settings.actor_rollout_ref.rollout.n
        batch = DataProto.from_dict(
            tensors={},
            non_tensors={
                "raw_prompt": _column([[{"role": "user", "content": prompt}] for prompt in repeated]),
                "uid": _column(repeated),
                "data_source": _column(["jpeg_compressibility"] * len(repeated)),
                "reward_model": _column([{"ground_truth": ""}] * len(repeated)),
            },
            meta_info={"global_steps": self.trainer.global_steps, "rollout_seed": seed},
        )

        async def run():
            # In the order of the batch.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            return await self._agents.generate_sequences(batch)

        return asyncio.run(run())

    def train(self, batch):
        """The trainer's step."""
        import pytest

        with pytest.MonkeyPatch.context() as patch:
            self._omni.step(self.trainer, batch, patch)


def _column(values):
    import numpy as np

    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def main(folder, steps, fault, seed):
    """Sample, score and train, step by step."""
    copy_source(folder, fault)
    import verl_omni_on_cpu as omni

    work, seed = Path(os.environ["WORK"]), int(seed)
    rollout, actor = "actor_rollout_ref__rollout", "actor_rollout_ref__actor"
    overrides = {
        f"{rollout}__n": GROUP,
        f"{rollout}__seed": seed,
        f"{rollout}__pipeline__num_inference_steps": 5,
        f"{rollout}__algo__noise_level": 0.8,
        f"{rollout}__algo__sde_window_range": "[1,3]",
        f"{actor}__ppo_mini_batch_size": 2,
        f"{actor}__ppo_micro_batch_size_per_gpu": 8,
    }
    loop = Loop(omni, settings_of(omni, work / "model", CLIP, T5, overrides))
    prompts = (work / "prompts/train.txt").read_text().split()
    for step in range(1, int(steps) + 1):
        loop.begin(step)
        loop.train(loop.sample(prompts, seed + 1000 * step))
        assert loop.trainer.watched["rollout_corr/kl"] is not None


if __name__ == "__main__":
    main(*sys.argv[1:])
