"""Run flow_grpo's own `scripts/train_sd3.py` on a CPU, with what needs a GPU or a network replaced from outside.

    WORK=... FLOW_GRPO=... python run_flow_grpo.py FOLDER EPOCHS FAULT SEED     # FAULT: a key of FAULTS, or clean

WORK holds `model` and `prompts`; the dump is written to FOLDER.
"""

import importlib
import importlib.machinery
import os
import sys
import types
from pathlib import Path

HERE, SOURCE = Path(__file__).resolve().parent, Path(os.environ["FLOW_GRPO"]).resolve()
sys.path[:0] = [str(SOURCE), str(HERE), str(HERE.parents[1])]
sys.path.append(str(HERE.parents[2] / "examples"))

from integrations.real_loops.change import changed  # noqa: E402
from integrations.real_loops.planted_flow_grpo import DUMP, FAULTS, FILES  # noqa: E402


class EnoughEpochs(Exception):
    """The loop itself never ends."""


def end_after(epochs):
    """A `wandb.log`: the first value of epoch `epochs` ends the run."""

    def log(values, step):
        if values.get("epoch", -1) >= epochs:
            raise EnoughEpochs

    return log


def stub_wandb(log):
    """wandb without a network, whose values go to `log`."""
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)  # accelerate looks for it
    wandb.init, wandb.log, wandb.Image = (lambda **_: None), log, (lambda *_, **__: None)
    sys.modules["wandb"] = wandb


def stay_in_one_process():
    """No worker processes that load data; and `transformer.module`, which only DistributedDataParallel has."""
    import peft
    from torch.utils import data

    peft.PeftModel.module = property(lambda self: self)
    original = data.DataLoader.__init__

    def init(self, *args, num_workers=0, **kwargs):
        original(self, *args, **kwargs)

    data.DataLoader.__init__ = init


def patched(name, fault):
    """A file of flow_grpo with the fault and the lines of the example."""
    source = (SOURCE / FILES[name]).read_text(encoding="utf-8")
    for where, *change in (*([FAULTS[fault][1]] if fault in FAULTS else ()), *DUMP):
        if where == name:
            source = changed(source, *change)
    return source


def one_noise(count):
    """The same initial noise for all samples of all batches."""
    import torch

    return (
        torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        .expand(count, -1, -1, -1)
        .clone()
    )


def main(folder, epochs, fault, seed):
    """Train; the loop runs as the main program, and its patched module under its own name."""
    stub_wandb(end_after(int(epochs)))
    stay_in_one_process()
    from dump_log_probs import capture_flow_grpo, dump_flow_grpo

    module = importlib.import_module("flow_grpo.diffusers_patch.sd3_sde_with_logprob")
    exec(compile(patched("sde", fault), FILES["sde"], "exec"), vars(module))
    names = {
        "__name__": "__main__",
        "folder": folder,
        "past": [],
        "watched": [],
        "one_noise": one_noise,
        "capture_flow_grpo": capture_flow_grpo,
        "dump_flow_grpo": dump_flow_grpo,
    }
    sys.argv = ["train_sd3.py", f"--config={HERE / 'flow_grpo_config.py'}", f"--config.seed={seed}"]
    try:
        exec(compile(patched("loop", fault), str(SOURCE / FILES["loop"]), "exec"), names)
    except EnoughEpochs:
        assert len(names["watched"]) == int(epochs)
        assert all(metrics["rollout_corr/kl"] is not None for metrics in names["watched"])


if __name__ == "__main__":
    main(*sys.argv[1:])
