"""Errors of an incomplete installation, in one line. Only Python's own library is imported here."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).parents[2]
_OURS = "flowcorr"


def told(error: BaseException) -> str | None:
    """The message for an error of a dependency that is missing or cannot be imported, with the command that mends it.

    None for every other error.
    """
    for cause in _chain(error):
        if isinstance(cause, ModuleNotFoundError) and cause.name and not cause.name.startswith(_OURS):
            return f"flowcorr needs {cause.name}, which is not installed; install it with: {_install()}"
        package = _imported(cause)
        if package is not None:
            reason = " ".join(f"{type(cause).__name__}: {cause}".split())
            return (
                f"flowcorr needs {package}, which is installed but cannot be imported ({reason}); install it anew "
                f"with: pip install --force-reinstall --no-deps {shlex.quote(_distribution(package))}"
            )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, the origin first."""
    if error is not None:
        yield from _chain(error.__cause__)
        yield error


def _imported(error: BaseException) -> str | None:
    """The package that failed to import: the owner of the last module that ran below all frames of flowcorr."""
    package = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if room in (_OURS, "__main__"):
            package = None
        elif frame.f_code.co_name == "<module>":
            package = room
    return package


def _install() -> str:
    in_checkout = (_HERE / "pyproject.toml").is_file()
    return f"pip install -e {shlex.quote(str(_HERE))}" if in_checkout else f"pip install {_OURS}"


def _distribution(package: str) -> str:
    """The name by which pip knows a package, such as `PyYAML` of `yaml`."""
    import importlib.metadata  # here: it takes longer to import than all that a command needs up to its first error

    return importlib.metadata.packages_distributions().get(package, [package])[0]
