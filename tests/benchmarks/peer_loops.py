"""One loop of `beside_peers.py` in a process of its own, which takes turns with the others.

    python tests/benchmarks/peer_loops.py LOOP SETTING-as-JSON FOLDER

LOOP is a name in `PEERS` or in `FLOWCORR`. After an epoch that warms up, the process waits for a line on standard input
before each epoch, and answers with a line of JSON: seconds and CPU seconds of the rollout and of the whole epoch, and
the highest memory since its start in MB. FOLDER holds `model` and `prompts`.
"""

import itertools
import json
import os
import re
import runpy
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

BATCH, BATCHES, GROUP, STEPS, UPDATES = 8, 4, 8, 10, 2
NEVER = 10**6
ADAPTED = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v")
"""Layers with an adapter, where a loop has to be told."""
FLOWCORR = {
    "flowcorr": ("rollout.batch_size=8", "actor.micro_batch_size=8", "actor.fold_steps=false"),
    "defaults": (),
    "compiled": ("actor.compile=true",),
    "longer": ("sampling.post_window_stride=2",),
    "longest": ("sampling.post_window_stride=8",),
}
"""By name: overrides. The first has the batches of the others' loops."""
LONGER = {"longer": 2, "longest": 8}
"""The steps of the schedule that one step of these loops covers, for which a window has to leave room."""


def high_water() -> float:
    """The most memory that this process held since its start, in MB; `ru_maxrss` would begin with the parent's."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) / 1024


@dataclass(frozen=True)
class Setting:
    """What is equal in all loops.

    Attributes:
        pixels: of an image's side; 64 are 64 image tokens.
        clip, t5: text tokens of each encoder.
        window: trained steps of the ten.
        threads: of torch.
    """

    pixels: int
    clip: int
    t5: int
    window: int
    threads: int

    @property
    def tokens(self) -> str:
        return f"{(self.pixels // 8) ** 2} + {self.clip + self.t5}"


class Turns:
    """Waits for the turn before each epoch and tells what it took."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # the loops print
        self._warm = False
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """The begin of an epoch, and the end of its rollout."""
        self._marks.append((time.perf_counter(), time.process_time()))

    def end(self) -> None:
        """The end of an epoch: answer, and wait. At the end of the input the process ends."""
        self.mark()
        begin, sampled, end = self._marks[-3:]
        answer = {
            "rollout": sampled[0] - begin[0],
            "rollout_cpu": sampled[1] - begin[1],
            "seconds": end[0] - begin[0],
            "cpu": end[1] - begin[1],
            "memory": high_water(),
        }
        print(json.dumps(answer if self._warm else {}), file=self._answers, flush=True)
        self._warm = True
        if not sys.stdin.readline():
            os._exit(0)
        self._marks.clear()


def flow_grpo(setting: Setting, folder: Path, turns: Turns) -> None:
    """Its own `scripts/train_sd3.py`. Only the token counts, which are fixed in its text, are replaced."""
    import importlib

    os.environ["WORK"] = str(folder)
    from integrations.real_loops import run_flow_grpo

    updates = 0

    def log(values, step):
        nonlocal updates
        if any(name.startswith("reward_") and name != "reward_std_mean" for name in values):
            turns.mark()
        if "inner_epoch" in values:
            updates += 1
            if updates % UPDATES == 0:
                turns.end()
                turns.mark()

    run_flow_grpo.stub_wandb(log)
    run_flow_grpo.stay_in_one_process()
    module = importlib.import_module("flow_grpo.diffusers_patch.train_dreambooth_lora_sd3")
    text = (
        Path(module.__file__)
        .read_text(encoding="utf-8")
        .replace("max_length=77", f"max_length={setting.clip}")
    )
    exec(compile(text, module.__file__, "exec"), vars(module))
    loop = run_flow_grpo.SOURCE / "scripts/train_sd3.py"
    text = loop.read_text(encoding="utf-8").replace(
        "max_sequence_length=128", f"max_sequence_length={setting.t5}"
    )
    overrides = {
        "resolution": setting.pixels,
        "sample.num_steps": STEPS,
        "sample.train_batch_size": BATCH,
        "sample.num_image_per_prompt": GROUP,
        "sample.num_batches_per_epoch": BATCHES,
        "train.batch_size": BATCH,
        "train.gradient_accumulation_steps": BATCHES // UPDATES,
        "train.timestep_fraction": (setting.window + 0.5) / STEPS,
        "train.beta": 0.0,
        "train.ema": False,
        "eval_freq": NEVER,
        "save_freq": NEVER,
    }
    config = Path(run_flow_grpo.HERE) / "flow_grpo_config.py"
    sys.argv = [
        "train_sd3.py",
        f"--config={config}",
        *(f"--config.{key}={value}" for key, value in overrides.items()),
    ]
    turns.mark()
    exec(compile(text, str(loop), "exec"), {"__name__": "__main__"})


def flow_factory(setting: Setting, folder: Path, turns: Turns) -> None:
    """Its own `flow_factory.train`, in float32; the T5's length, which it leaves to diffusers, is added to its text."""
    import yaml
    from integrations.real_loops.change import changed
    from integrations.real_loops.planted_flow_factory import FILES, FLOAT32
    from integrations.real_loops.run_flow_factory import CONFIG

    work = folder / "flow_factory"
    shutil.copytree(Path(os.environ["FLOW_FACTORY"]) / "src", work / "src")
    negative = "negative_prompt_3=negative_prompt"
    length = ("model", (negative, 0), "instead", f"{negative}, max_sequence_length={setting.t5}")
    for name, *change in (FLOAT32, length):
        path = work / "src" / "flow_factory" / FILES[name]
        path.write_text(changed(path.read_text(encoding="utf-8"), *change), encoding="utf-8")
    config = yaml.safe_load(CONFIG.format(work=folder, folder=work, epochs=NEVER, seed=42))
    config["model"] |= {"lora_rank": 32, "lora_alpha": 64}
    config["train"] |= {
        "resolution": setting.pixels,
        "num_inference_steps": STEPS,
        "per_device_batch_size": BATCH,
        "group_size": GROUP,
        "unique_sample_num_per_epoch": BATCH * BATCHES // GROUP,
        "gradient_step_per_epoch": UPDATES,
    }
    config["scheduler"] |= {"num_sde_steps": setting.window, "sde_steps": list(range(setting.window))}
    (work / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    sys.path.insert(0, str(work / "src"))
    from flow_factory.trainers.grpo import GRPOTrainer

    sample, feedback, optimize = GRPOTrainer.sample, GRPOTrainer.prepare_feedback, GRPOTrainer.optimize

    def sampled(self):
        turns.mark()
        return sample(self)

    def scored(self, samples):
        feedback(self, samples)
        turns.mark()

    def optimized(self, samples):
        optimize(self, samples)
        turns.end()

    GRPOTrainer.sample, GRPOTrainer.prepare_feedback, GRPOTrainer.optimize = sampled, scored, optimized
    sys.argv = ["flow_factory.train", str(work / "config.yaml")]
    runpy.run_module("flow_factory.train", run_name="__main__")


def verl_omni(setting: Setting, folder: Path, turns: Turns) -> None:
    """Its own agent loop, SD3 pipeline and v1 trainer in one process; `run_verl_omni` says what stands around them.

    Its default, which computes blocks again in the backward pass, is off: none of the others does so.
    """
    import verl_omni_on_cpu as omni
    from integrations.real_loops.run_verl_omni import Loop, settings_of

    model, rollout, actor = (f"actor_rollout_ref__{part}" for part in ("model", "rollout", "actor"))
    overrides = {
        f"{model}__enable_gradient_checkpointing": "false",
        f"{model}__lora_rank": 32,
        f"{model}__lora_alpha": 64,
        f"{model}__target_modules": f"[{','.join(ADAPTED)}]",
        f"{rollout}__n": GROUP,
        f"{rollout}__pipeline__height": setting.pixels,
        f"{rollout}__pipeline__width": setting.pixels,
        f"{rollout}__pipeline__num_inference_steps": STEPS,
        f"{rollout}__algo__sde_window_size": setting.window,
        f"{rollout}__algo__sde_window_range": f"[0,{setting.window}]",
        f"{actor}__ppo_mini_batch_size": BATCH * BATCHES // GROUP // UPDATES,
        f"{actor}__ppo_micro_batch_size_per_gpu": BATCH,
        "algorithm__rollout_correction__bypass_mode": "true",
    }
    settings = settings_of(omni, folder / "model", setting.clip, setting.t5, overrides)
    loop = Loop(omni, settings, BATCH)
    prompts = (folder / "prompts/train.txt").read_text(encoding="utf-8").split()
    for step in itertools.count(1):
        loop.begin(step)
        turns.mark()
        batch = loop.sample(prompts, step)
        turns.mark()
        loop.train(batch)
        turns.end()


def overrides_of(setting: Setting, folder: Path) -> list[str]:
    """Keys of `tiny_jpeg_lora` that make it the others' work; the rollout's log-probs are the old ones, as there."""
    return [
        f"model.path={folder / 'model'}",
        f"model.max_sequence_length={setting.t5}",
        "model.lora.rank=32",
        "model.lora.alpha=64",
        "sampling.guidance_scale=4.5",
        f"sampling.height={setting.pixels}",
        f"sampling.width={setting.pixels}",
        f"sampling.num_inference_steps={STEPS}",
        f"sampling.sde_window_size={setting.window}",
        f"sampling.sde_window_range=[0,{setting.window}]",
        f"rollout.prompts_per_step={BATCH * BATCHES // GROUP}",
        f"rollout.n={GROUP}",
        "rollout.same_initial_noise=false",
        f"actor.mini_batches={UPDATES}",
        "algorithm.advantage_std=global",
        "algorithm.rollout_correction.preset=bypass_ppo_clip",
        f"data.path={folder / 'prompts' / 'train.txt'}",
        f"data.heldout_path={folder / 'prompts' / 'heldout.txt'}",
        f"trainer.num_threads={setting.threads}",
        f"trainer.total_steps={NEVER}",
        f"trainer.save_every={NEVER}",
        "trainer.eval_every=0",
        "trainer.image_every=0",
    ]


def flowcorr(name: str, setting: Setting, folder: Path, turns: Turns) -> None:
    """`flowcorr train`."""
    from flowcorr import config, trainer
    from flowcorr.trainer.observer import Silent

    class Marks(Silent):
        """An epoch begins with its rollout; its end is the begin of the next."""

        begun = False

        def on_phase(self, phase: str) -> None:
            if phase == "rollout":
                if self.begun:
                    turns.end()
                self.begun = True
                turns.mark()
            elif phase == "update":
                turns.mark()

    settings = config.load("tiny_jpeg_lora", [*overrides_of(setting, folder), *FLOWCORR[name]])
    trainer.train(settings, folder / name, observer=Marks())


PEERS = {"flow_grpo": flow_grpo, "flow_factory": flow_factory, "verl_omni": verl_omni}
"""By name, which in capitals is the environment variable with the path of its source tree: the loop."""


def main(loop: str, setting: Setting, folder: Path) -> None:
    turns = Turns()
    import torch

    torch.set_num_threads(setting.threads)
    if loop in FLOWCORR:
        flowcorr(loop, setting, folder, turns)
    else:
        PEERS[loop](setting, folder, turns)


def encoded(setting: Setting) -> str:
    """The setting as an argument of this script."""
    return json.dumps(asdict(setting))


if __name__ == "__main__":
    main(sys.argv[1], Setting(**json.loads(sys.argv[2])), Path(sys.argv[3]))
