"""Run Flow-Factory's own `flow_factory.train` on a CPU at any commit since March 2026, with the example's lines.

    WORK=... python flow_factory.py SOURCE FOLDER NAME     # NAME: a key of RUNS; SOURCE: `src` of a checkout

WORK holds `model` and `prompts`; the dump is written to FOLDER, the changed copy of the source to FOLDER-source.
"""

import os
import runpy
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

from integrations.real_loops.change import Change, changed  # noqa: E402
from integrations.real_loops.planted_flow_factory import FLOAT32  # noqa: E402
from integrations.real_loops.run_flow_factory import CONFIG  # noqa: E402

RUNS: Mapping[str, Mapping[str, str]] = {
    "ff_half_latents": {"latent_storage_dtype: fp32, ": "", 'mixed_precision: "no"': "mixed_precision: bf16"},
    "ff_guard_all_means": {"trainer_type: grpo": "trainer_type: grpo-guard"},
    "ff_guidance_never_on": {},
}
"""By bug: changes of the configuration of `real_loops`."""

_END = "\n    # =========================== Advantage Computation"
_ROWS = "[batch_idx * (size := self.training_args.per_device_batch_size) : (batch_idx + 1) * size, idx]"
_MEANS = (
    "kls{rows} = ((output.next_latents_mean - old_next_latents_mean).flatten(1).pow(2).mean(1)"
    " / (2 * (output.std_dev_t * torch.sqrt(-output.dt)).flatten(1)[:, 0] ** 2)).detach().cpu()"
)


def changes(guard: bool) -> list[Change]:
    """The lines that the docstrings of the example name, in the loop of GRPO or of GRPO-Guard."""
    which = 1 if guard else 0
    dump = (
        "        if inner_epoch == 0:\n                dump_flow_factory(\n                    os.environ['DUMP'], "
        "self.epoch, shuffled_samples, current, fresh, self, self.replay, **kept\n                )\n"
    )
    made: list[Change] = [
        (
            "loop",
            ("class GRPOTrainer(", 0),
            "before",
            "from real_bugs_lines import capture_flow_factory, dump_flow_factory",
        ),
        ("loop", ("class GRPOTrainer(", 0), "before", "import os"),
        (
            "loop",
            ("with torch.no_grad(), self.autocast():", which),
            "before",
            "trajectory_indices = [0, *trajectory_indices, self.training_args.num_inference_steps]",
        ),
        (
            "loop",
            ("samples.extend(sample_batch)", which),
            "before",
            "if batch_index == 0: self.replay = capture_flow_factory(sample_batch, self, 'float32')",
        ),
        (
            "loop",
            ("for batch_idx, batch in enumerate(tqdm(", which),
            "before",
            "current = torch.full((len(shuffled_samples), self.num_train_timesteps), torch.nan); "
            "fresh = torch.zeros_like(current); kls = torch.full_like(current, torch.nan); first = self.step; "
            f"kept = {'dict(old_rollout_kl=kls)' if guard else '{}'}",
        ),
    ]
    scored = f"current{_ROWS} = output.log_prob.detach().cpu(); fresh{_ROWS} = float(self.step == first)"
    if guard:
        place = ("# PPO-style clipped loss", 1)
        made.append(("loop", place, "before", f"{scored}; {_MEANS.format(rows=_ROWS)}"))
        made.append(("loop", ("", -1), "end", "    " + dump))
    else:
        made.append(("loop", ("# 3. Compute loss", 0), "before", scored))
        made.append(("loop", (_END, 0), "instead", f"    {dump}{_END}"))
    return made


def apply(source: Path, made: list[Change]) -> None:
    """Write the changes into a copy of the source."""
    files = {"loop": "trainers/grpo.py", "trainer": "trainers/abc.py"}
    for name, place, how, text in made:
        path = source / "flow_factory" / files[name]
        before = path.read_text(encoding="utf-8")
        after = f"{before.rstrip()}\n{text}" if how == "end" else changed(before, place, how, text)
        path.write_text(after, encoding="utf-8")


def main(checkout: str, folder: str, name: str) -> None:
    """Copy, change and train."""
    source, work = Path(f"{folder}-source"), Path(os.environ["WORK"])
    shutil.copytree(checkout, source)
    config = CONFIG.format(work=work, folder=folder, epochs=os.environ["EPOCHS"], seed=42)
    for words, others in RUNS[name].items():
        assert words in config, words
        config = config.replace(words, others)
    half = "bf16" in config
    apply(source, [*([] if half else [FLOAT32]), *changes("guard" in config)])
    Path(f"{folder}.yaml").write_text(config, encoding="utf-8")
    os.environ["DUMP"] = folder
    sys.path[:0] = [str(source), str(HERE)]
    sys.argv = ["flow_factory.train", f"{folder}.yaml"]
    runpy.run_module("flow_factory.train", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
