"""What replayed samples tell about each part of another trainer's run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from flowcorr.instruments.doctor.findings import EXIT_CODES, Status

Part = Literal[
    "schedule",
    "noise",
    "log_probs",
    "before",
    "between",
    "after",
    "prompts",
    "guidance",
    "adapter",
    "decode",
    "reward",
    "advantages",
]
Confidence = Literal["certain", "likely", ""]
PARTS: tuple[Part, ...] = (
    "schedule",
    "noise",
    "before",
    "log_probs",
    "between",
    "after",
    "prompts",
    "guidance",
    "adapter",
    "decode",
    "reward",
    "advantages",
)
"""In the order in which they are shown: where one is wrong, those after it may be wrong because of it."""
CAUSES: Mapping[str, str] = {
    "wrong_prompt": "the engine took the embeddings of other samples, or of an earlier batch",
    "sequence_length": "prompts are cut or padded to another length",
    "guidance_off": "the engine took no guidance",
    "negative_prompt": "the engine took an empty negative prompt",
    "adapter_not_applied": "the engine sampled with the base model",
    "wrong_shift": "the sigmas are those of the model's scheduler with another shift",
    "other_schedule": "the sigmas are not those of the model's own scheduler",
    "timesteps": "the timesteps are not those of the model's own scheduler",
    "rounded_sigmas": "the table of sigmas is in half precision",
    "rounded_timesteps": "the transformer was fed timesteps in half precision",
    "noise_reused": "noise was drawn twice",
    "noise_scale": "noise is not standard normal",
    "log_probs_summed": "log-probs are sums over the latent, where means are expected",
    "log_probs_normaliser": "log-probs lack `- log s` or `- log(2 pi) / 2`, and the trainer's have it",
    "log_probs_unscaled": "log-probs lack the factor `1 / (2 s^2)`",
    "swapped_images": "images and latents of different samples are paired",
    "images_of_step_before": "images and latents of different training steps are paired",
    "decoder_unscaled": "the decoder lacks its scaling factor or its shift",
    "channels_reversed": "red and blue of the images are exchanged",
    "flipped_images": "the images are upside down",
    "advantages_not_centred": "advantages have a mean far from 0, so all samples are pushed one way",
}
"""What each cause of a failed part means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said about one part.

    Attributes:
        part: which.
        status: FAIL where a cause is named, WARN where it differs and the cause cannot be told, SKIP where nothing can
            be told, PASS where it agrees.
        message: in words.
        cause: its name, empty unless the part failed.
        confidence: `certain` where the replay agrees once this cause is undone, and with no other; `likely` where
            several samples show it and others cannot tell.
        evidence: the numbers that tell.
        samples: one number a sample, in limits: above 1 it differs. None where the part has no such numbers.
        remedy: what to do, or what to capture so that more can be told.
        step: the training step.
    """

    part: Part
    status: Status
    message: str
    cause: str = ""
    confidence: Confidence = ""
    evidence: str = ""
    samples: tuple[float, ...] | None = None
    remedy: str = ""
    step: int = 0

    def __post_init__(self) -> None:
        assert not self.cause or self.cause in CAUSES, "every cause has its meaning in the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """All verdicts of a dump.

    Attributes:
        folder: the dump.
        model: what replayed it.
        steps: the training steps whose samples were replayed.
        verdicts: one a part, in the order of `PARTS`.
        notes: what was not captured, a line each.
    """

    folder: str
    model: str
    steps: Sequence[int]
    verdicts: Sequence[Verdict]
    notes: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """0 if nothing differs, 1 if something does and its cause cannot be told, 2 if a cause is named."""
        return max(EXIT_CODES[verdict.status] for verdict in self.verdicts)

    @property
    def causes(self) -> list[str]:
        """The causes that are named."""
        return [verdict.cause for verdict in self.verdicts if verdict.status == "FAIL"]

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"exit_code": self.exit_code, **asdict(self)}


_INPUTS: frozenset[Part] = frozenset({"prompts", "guidance", "adapter"})
_WEIGHT: dict[Status, int] = {"FAIL": 3, "WARN": 2, "PASS": 1, "SKIP": 0}


def worst(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict a part, of those of several training steps: the worst, and the first of equal ones.

    Where a step's replay differs and no cause explains it, its inputs have no verdict. Theirs of other steps are then
    no sign that they were right in all.
    """
    found: dict[Part, Verdict] = {}
    judged: dict[Part, set[int]] = {}
    for verdict in verdicts:
        judged.setdefault(verdict.part, set()).add(verdict.step)
        known = found.get(verdict.part)
        if known is None or _WEIGHT[verdict.status] > _WEIGHT[known.status]:
            found[verdict.part] = verdict
    unclear = {verdict.step for verdict in verdicts if verdict.status == "WARN"}
    for part in _INPUTS & found.keys():
        if found[part].status == "PASS" and unclear - judged[part]:
            found[part] = _of_some_steps(found[part], judged[part], unclear - judged[part])
    return [found[part] for part in PARTS if part in found]


def _of_some_steps(verdict: Verdict, judged: set[int], unclear: set[int]) -> Verdict:
    at, others = (", ".join(map(str, sorted(steps))) for steps in (judged, unclear))
    return replace(
        verdict,
        status="SKIP",
        message=f"{verdict.message} at training step {at}; not judged at {others}, where the replay differs",
    )
