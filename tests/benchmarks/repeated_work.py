"""Which model passes a training step computes twice, and their share of its CPU time.

    python -m tests.benchmarks.repeated_work [--steps 10] [SETTING ...]

Trains ten steps, one replay among them, in three settings: the recipe `tiny_ocr_lora`, whose engine is coarser than its
trainer; the work of `beside_peers.py` at long prompts, with guidance and an engine of the trainer's own weights; a tiny
Wan with videos. Every pass of the transformer, the text encoders and the autoencoder is watched. A row of a pass is
repeated where the same weights had the same inputs earlier in the step, to the bit. Prints CPU time by phase and part
as shares of a step, and how much of it repeats which phase. Backward passes belong to no part.
"""

import argparse
import gc
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import nn

from flowcorr import config
from flowcorr.config.schema import Config
from flowcorr.trainer import train_step
from flowcorr.trainer.setup import build_run
from tests.benchmarks import false_alarms
from tests.benchmarks.beside_peers import SETTINGS, write_work
from tests.benchmarks.peer_loops import overrides_of

IN_TURN = ["reward.placement=local", "rollout.batch_size=null"]
METHODS = ("forward", "encode", "decode")


def embedded(_: Path) -> Config:
    return config.load("tiny_ocr_lora", IN_TURN)


def guided(folder: Path) -> Config:
    setting = SETTINGS[1]
    write_work(setting, folder)
    preset = "algorithm.rollout_correction.preset=disabled"
    return config.load("tiny_jpeg_lora", [*overrides_of(setting, folder), *IN_TURN, preset])


def video(folder: Path) -> Config:
    return false_alarms.configuration("wan, video", seed=0, steps=100, models=folder)


BUILDERS: dict[str, Callable[[Path], Config]] = {"embedded": embedded, "guided": guided, "video": video}


class Watched:
    """CPU seconds of a training step by phase and part, without its own.

    Attributes:
        phases: seconds by phase.
        parts: seconds by phase and part.
        repeated: of those, seconds of what was computed before in the step, by phase, part and earlier phase.
    """

    def __init__(self) -> None:
        self.phases: Counter[str] = Counter()
        self.parts: Counter[tuple[str, str]] = Counter()
        self.repeated: Counter[tuple[str, str, str]] = Counter()
        self._phase, self._own, self._since = "", 0.0, 0.0
        self._earlier: dict[str, str] = {}
        self._inside = False

    def begin(self) -> None:
        self._earlier.clear()
        self._phase, self._since = "", self._now()

    def on_phase(self, phase: str) -> None:
        now = self._now()
        self.phases[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def _now(self) -> float:
        return time.process_time() - self._own

    def call(self, method: Callable, part: str, module: nn.Module, *args, **kwargs) -> object:
        """Run one pass, and book an equal share of its time on each row of its batch."""
        if self._inside:
            return method(module, *args, **kwargs)
        begin = time.process_time()
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        batch = max(len(tensor) for tensor in tensors if tensor.dim())
        weights = digest(module.parameters()) + str(uses_adapter(module))
        keys = [
            weights
            + digest(tensor[row] if len(tensor) == batch else tensor for tensor in tensors if tensor.dim())
            for row in range(batch)
        ]
        self._inside, middle = True, time.process_time()
        try:
            result = method(module, *args, **kwargs)
        finally:
            self._inside = False
        end = time.process_time()
        for key in keys:
            self.parts[self._phase, part] += (end - middle) / batch
            if key in self._earlier:
                self.repeated[self._phase, part, self._earlier[key]] += (end - middle) / batch
            self._earlier.setdefault(key, self._phase)
        self._own += time.process_time() - begin - (end - middle)
        return result


def digest(tensors: Iterable[torch.Tensor]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def uses_adapter(module: nn.Module) -> bool:
    """Whether a pass is the policy's; without its adapter it is the reference's."""
    return not any(getattr(layer, "disable_adapters", False) is True for layer in module.modules())


@contextmanager
def watching(watched: Watched, transformer: nn.Module) -> Iterator[None]:
    """Book every pass of modules like this one, of text encoders and of autoencoders."""
    from diffusers.models.autoencoders.vae import AutoencoderMixin
    from transformers import PreTrainedModel

    parts: dict[type, str] = {type(transformer): "transformer"}
    for module in gc.get_objects():
        if isinstance(module, PreTrainedModel):
            parts.setdefault(type(module), "text encoder")
        elif isinstance(module, AutoencoderMixin):
            parts.setdefault(type(module), "autoencoder")

    def booked(kind: type, name: str) -> Callable:
        method, part = getattr(kind, name), parts[kind]
        return lambda module, *args, **kwargs: watched.call(method, part, module, *args, **kwargs)

    with ExitStack() as stack:
        for kind in parts:
            for name in METHODS:
                if hasattr(kind, name):
                    stack.enter_context(patch.object(kind, name, booked(kind, name)))
        yield


def measure(name: str, steps: int) -> None:
    """Train, after a step that warms up, and print the shares of one setting."""
    watched = Watched()
    with TemporaryDirectory() as folder:
        run, _ = build_run(BUILDERS[name](Path(folder)))
        run.engine.sync(run.actor.weights.snapshot())
        train_step(run, 1, watched.on_phase)
        watched.phases.clear()
        with watching(watched, run.actor.weights.transformer):
            for step in range(2, steps + 2):
                watched.begin()
                train_step(run, step, watched.on_phase)
                watched.on_phase("")
        run.engine.close()
    whole = watched.phases.total()
    print(f"{name}: {whole / steps:.2f} CPU s a step, {watched.repeated.total() / whole:.1%} of it repeated")
    for phase, seconds in watched.phases.most_common():
        cells = [f"  {phase or 'between phases'} {seconds / whole:.1%}"]
        for (of_phase, part), spent in watched.parts.items():
            if of_phase == phase:
                cells.append(f"{part} {spent / whole:.1%}")
        for (of_phase, part, earlier), spent in watched.repeated.items():
            if of_phase == phase:
                cells.append(f"{part} as in {earlier} {spent / whole:.1%}")
        print("; ".join(cells), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "settings", nargs="*", choices=[*BUILDERS, []], metavar="SETTING", help=", ".join(BUILDERS)
    )
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    for setting in arguments.settings or BUILDERS:
        measure(setting, arguments.steps)
