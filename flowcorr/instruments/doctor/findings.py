"""Findings of the doctor's checks: healthy, a warning, serious, or a note where nothing can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowcorr.instruments.finding import Finding

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
"""What each cause that a check of captured samples names means; that of another finding is its check."""


def judged(
    value: float,
    limit: float,
    good: str,
    bad: str,
    remedy: str,
    *,
    fails_above: float | None = None,
) -> Finding:
    """The finding that follows from a number: healthy up to `limit`, serious above `fails_above`, else a warning.

    Args:
        value: the number; NaN is serious.
        limit: the largest value that is healthy.
        good: the sentence where it is.
        bad: the sentence where it is not.
        remedy: what to do then.
        fails_above: the largest value that only warns; `limit` by default, so that nothing warns.
    """
    if value <= limit:
        return passed(good, value=value, limit=limit)
    if fails_above is not None and value <= fails_above:
        return warned(bad, remedy, value=value, limit=limit)
    return failed(bad, remedy, value=value, limit=limit if fails_above is None else fails_above)


def passed(sentence: str, **numbers: Any) -> Finding:
    """A check that passed."""
    return Finding(level="healthy", cause="", sentence=sentence, numbers=_known(numbers))


def failed(sentence: str, remedy: str, *, cause: str = "", **numbers: Any) -> Finding:
    """A fault that was recognised, with the numbers by which it was; `cause` is one of `CAUSES`, or the check."""
    assert not cause or cause in CAUSES, "every cause has its meaning in the table"
    return Finding(level="serious", cause=cause, sentence=sentence, numbers=_known(numbers), remedy=remedy)


def warned(sentence: str, remedy: str, **numbers: Any) -> Finding:
    """A loss of precision that was recognised, or a difference whose cause cannot be told."""
    return Finding(level="warning", cause="", sentence=sentence, numbers=_known(numbers), remedy=remedy)


def skipped(sentence: str, remedy: str = "", **numbers: Any) -> Finding:
    """A check that was not made, or that cannot tell; the remedy says what it would need."""
    return Finding(level="note", cause="", sentence=sentence, numbers=_known(numbers), remedy=remedy)


def of_check(name: str, finding: Finding) -> Finding:
    """The finding of the check `name`, whose cause is that name unless it named another."""
    if finding.cause in ("", name):
        return replace(finding, cause=name)
    return replace(finding, numbers={"check": name, **finding.numbers})


def check_of(finding: Finding) -> str:
    """The check that made a finding."""
    return finding.numbers.get("check", finding.cause)


def _known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if value is not None}
