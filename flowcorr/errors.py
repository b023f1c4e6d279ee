"""The errors that flowcorr raises on purpose, each with its remedy in the message."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MAX_SHOWN = 120


class FlowcorrError(Exception):
    """Base of all errors that flowcorr raises on purpose; the CLI prints them without a traceback."""


class ConfigError(FlowcorrError, ValueError):
    """A configuration key, file or combination that cannot be used."""


class BatchError(FlowcorrError, ValueError):
    """Tensors or records that do not fit together, or hold values that cannot be trained on."""


class BackendError(FlowcorrError, RuntimeError):
    """A rollout engine, reward or file system that failed while it was used."""


class RolloutFault(BackendError):
    """A training step that measured what only a fault explains, and was stopped before its state was kept.

    Args:
        message: what was found.
        step: the training step.
        findings: the `flowcorr.health.finding.Finding`s, the worst first.
        metrics: what the step had measured.
        terms: the `flowcorr.dumps.DumpedTerms` of its samples on this rank; None where it has none.
        by_worker: finds the rollout workers whose own samples prove a fault, and the findings of each; every rank has
            to call it. None where samples are not told apart.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int = 0,
        findings: Sequence[Any] = (),
        metrics: Mapping[str, float] | None = None,
        terms: Any = None,
        by_worker: Callable[[RolloutFault], Mapping[int, Sequence[Any]]] | None = None,
    ) -> None:
        super().__init__(message)
        self.step, self.findings, self.metrics, self.terms = step, findings, metrics or {}, terms
        self.by_worker = by_worker


class CheckpointError(FlowcorrError, RuntimeError):
    """A checkpoint that is incomplete, or belongs to another model or configuration."""


class MissingExtraError(FlowcorrError, ImportError):
    """An optional dependency that is not installed, or cannot be loaded.

    Args:
        feature: the feature that the user asked for, as they wrote it.
        package: the package that could not be imported.
        extra: the flowcorr extra that brings it, or None where none does.
        cause: the import error, if it says more than that the package is absent.
        install: the command that installs it, where no extra does.
    """

    def __init__(
        self,
        feature: str,
        package: str,
        extra: str | None,
        cause: BaseException | None = None,
        *,
        install: str | None = None,
    ) -> None:
        if cause is None or isinstance(cause, ModuleNotFoundError):
            install = install or f"pip install 'flowcorr[{extra}]'"
            message = f"{feature} needs {package}; install it with: {install}"
        else:
            message = f"{feature} needs {package}, which is installed but cannot be loaded: {cause}"
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by message, as workers hand errors to the trainer."""
        return _restore, (type(self), str(self))


def _restore(kind: type[Exception], message: str) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


def printable(text: str) -> str:
    """Escape control characters and broken bytes, which names of a stranger's files may hold."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shortened(text: str) -> str:
    """The first `MAX_SHOWN` characters of a text from a file, as they may stand in a message."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def as_utf8(text: str) -> str:
    """A text that can be written to a file: broken bytes, as names of a stranger's files may hold them, are escaped."""
    return text.encode(errors="backslashreplace").decode()


def one_sentence(error: BaseException) -> str:
    """A library's message in one line, without the full stop, so that a sentence may follow."""
    return " ".join(str(error).split()).rstrip(".")


def unknown_choice(key: str, value: object, choices: Iterable[str]) -> str:
    """Message for a value that is not among `choices`, with the nearest one."""
    names, text = list(choices), str(value)
    section = text.rpartition(".")[0] + "."
    start = len(section) if all(name.startswith(section) for name in names) else 0  # alike in all
    near = nearest(text[start:], [name[start:] for name in names])
    hint = f" (did you mean {text[:start]}{near}?)" if near else ""
    return f"{key}={value!r} is unknown{hint}; choose from {', '.join(names)}"


def nearest(text: str, names: Sequence[str]) -> str:
    """The name that was meant; empty if there is none.

    It begins with `text`, has its initials (`lr` for `learning_rate`), is spelled like it, or contains it.
    """
    asked = text.lower().replace(" ", "")
    holding = [name for name in names if len(asked) > 2 and asked in name.lower()]
    beginning = [name for name in holding if name.lower().startswith(asked)]
    initials = "".join(word[:1] for word in asked.split("_"))
    short = [name for name in names if len(initials) > 1 and name.lower() == initials]
    return next(iter([*beginning, *short, *difflib.get_close_matches(text, names, n=1), *holding]), "")
