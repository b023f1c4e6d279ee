"""The checks of captured samples by their replay: legs outside the window, its steps, inputs, and the trainer."""

from __future__ import annotations

from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.finding import Finding


def check_before(captured: Captured) -> Finding | None:
    return captured.replayed.get("before")


def check_between(captured: Captured) -> Finding | None:
    return captured.replayed.get("between")


def check_after(captured: Captured) -> Finding | None:
    return captured.replayed.get("after")


def check_transition(captured: Captured) -> Finding | None:
    return captured.replayed.get("transition")


def check_embeddings(captured: Captured) -> Finding | None:
    return captured.replayed.get("embeddings")


def check_guidance(captured: Captured) -> Finding | None:
    return captured.replayed.get("guidance")


def check_lora(captured: Captured) -> Finding | None:
    return captured.replayed.get("lora")


def check_trainer(captured: Captured) -> Finding | None:
    return captured.trained
