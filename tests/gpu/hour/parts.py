"""The parts of the hour in their order, and what each of them gets."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.hour.record import Row

if TYPE_CHECKING:
    import torch


class SkippedError(Exception):
    """The part cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        about: what it measures.
        minutes: that it takes: measured on an H200, or estimated for an H100, of parts that have not run yet.
        module: of this package, whose `measure(hour)` does it; `measure(hour, argument)` with an argument.
        argument: see there.
        on_host: whether no CUDA device may be visible to it.
    """

    about: str
    minutes: float
    module: str
    argument: str | None = None
    on_host: bool = False


RECIPES = {
    "sd35": "sd35_medium_ocr_lora",
    "flux": "flux_dev_pickscore_lora",
    "qwen_image": "qwen_image_ocr_lora_rollout_corr",
    "flux2_klein": "flux2_klein_pickscore_lora",
    "z_image": "z_image_pickscore_lora",
}
"""The recipe of each model family."""


def _of_families(about: str, module: str, minutes: tuple[float, ...]) -> dict[str, Part]:
    """A part for each of the first families, as many as have `minutes`."""
    return {
        f"{module}_{family}": Part(about=f"{family}: {about}", minutes=each, module=module, argument=family)
        for family, each in zip(RECIPES, minutes, strict=False)
    }


PARTS: dict[str, Part] = {
    "machine": Part(about="what the device reaches of its data sheet", minutes=0.2, module="machine"),
    "plan": Part(about="what `flowcorr plan` predicts here", minutes=1, module="predict", on_host=True),
    "embedded": Part(about="the embedded model on the device and on the CPU", minutes=1.2, module="embedded"),
    "paths": Part(about="a training step of each kind, and resuming", minutes=1.5, module="paths"),
    **_of_families("memory and time of a step, host reads, folded or not", "step", (1.3, 2, 4, 0.8, 1.5)),
    **_of_families("noise floor by timestep and precision", "noise", (1, 4, 5, 3, 4)),
    "encoders": Part(about="text encoders on the device and offloaded", minutes=0.6, module="encoders"),
    "correction": Part(about="cost of the correction", minutes=0.1, module="correction"),
    "vllm_omni": Part(about="weight sync, sleep, doctor and audit", minutes=5.5, module="engine"),
    **_of_families("compiled blocks", "compiled", (2, 2, 2)),
    "curve": Part(about="whole runs on the device and on the CPU", minutes=2.2, module="curve"),
    "ranks": Part(about="two ranks beside one", minutes=2, module="two_ranks"),
    "tests": Part(about="`pytest -m gpu`", minutes=0.8, module="gpu_tests"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """What a part works with.

    Attributes:
        device: measured.
        tiny: whether models and batches are tiny.
        folder: for files of this part.
        facts: of the parts before, by part.
        lines: gets a line of JSON for each row and fact as soon as there is one.
    """

    device: torch.device
    tiny: bool
    folder: Path
    facts: Mapping[str, Mapping[str, Any]]
    lines: Path

    def row(self, what: str, value: Any, **more: Any) -> None:
        """Report a number; see `Row`. Speed is not judged in tiny sizes."""
        if self.tiny and more.get("unit") in ("s", "ms", "of the data sheet"):
            more.pop("within", None)
        row = Row(what=what, value=value, **more)
        print(f"{what}: {value} {row.unit} {row.verdict}", flush=True)
        self._write({"row": asdict(row)})

    def fact(self, name: str, value: Any) -> None:
        """Leave a value to later parts."""
        self._write({"fact": [name, value]})

    def fact_of(self, part: str, name: str) -> Any:
        """What an earlier part has left.

        Raises:
            SkippedError: it has not.
        """
        if name not in self.facts.get(part, {}):
            raise SkippedError(f"needs {name!r} of the part {part!r}, which has not measured it")
        return self.facts[part][name]

    @contextlib.contextmanager
    def reported(self, name: str) -> Iterator[None]:
        """Make a row of an error inside the block, so that the rest of the part goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.row(name, "failed", failed=True, note=f"{type(error).__name__}: {error}"[-300:])

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
