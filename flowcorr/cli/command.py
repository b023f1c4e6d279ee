"""Shared by all commands: a row for each, common arguments, and the output of results."""

from __future__ import annotations

import argparse
import contextlib
import errno
import inspect
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowcorr.errors import ConfigError

if TYPE_CHECKING:
    from flowcorr.config import Config
    from flowcorr.instruments.outcome import Report


class Argument:
    """An argument of a command, as `add_argument` takes it."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: `flowcorr NAME ARGUMENTS`.

    Attributes:
        name: its name.
        run: what it does, from the arguments to the exit code; its docstring is the help of the command.
        arguments: what it takes.
        epilog: text below the help.
    """

    name: str
    run: Callable[[argparse.Namespace], int]
    arguments: Sequence[Argument] = ()
    epilog: str = ""

    @property
    def summary(self) -> str:
        """The first line of the help, for the list of commands."""
        first = (inspect.getdoc(self.run) or "").partition("\n")[0].rstrip(".")
        return first[0].lower() + first[1:]

    @property
    def description(self) -> str:
        """The rest of the help."""
        return (inspect.getdoc(self.run) or "").partition("\n")[2].strip()


OVERRIDES = Argument(
    "overrides", nargs="*", default=[], metavar="key=value", help="changes to the configuration"
)
RECIPE = Argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
RECIPE_OR_STEPS = Argument(
    "recipe", metavar="RECIPE", help="a YAML file, the name of a shipped recipe, or a folder of dumped steps"
)
IMPORTS = Argument(
    "--allow-import",
    action="append",
    default=[],
    metavar="NAME",
    help="import this package.module:name, a loss, rejection mode, engine or metric of the run's own; without it, "
    "reading a run runs no code of it",
)
RECIPES = """\
recipes for the embedded model:
  tiny_ocr_lora  tiny_ocr_lora_bypass  tiny_ocr_lora_grpo_guard  tiny_jpeg_lora
for real models on GPUs; the header of each names its source, its engine and the memory it needs:
  sd35_medium_ocr_lora  sd35_medium_ocr_lora_bypass  sd35_medium_ocr_lora_12gb
  qwen_image_ocr_lora_rollout_corr  qwen_image_ocr_lora_decoupled
  qwen_image_ocr_grpo_guard_lora  qwen_image_ocr_lora_24gb  qwen_image_ocr_lora_2x32gb
  flux_dev_pickscore_lora  flux2_klein_pickscore_lora  z_image_pickscore_lora  ovis_image_ocr_lora
  flux_kontext_edit_lora  qwen_image_edit_plus_lora  wan_ocr_lora
"""


def find_own_code() -> None:
    """Let the user's own losses and rewards be found in the working directory.

    Only commands that run such code call this: libraries look for optional packages on the same path.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def show_report(report: Report, *, as_json: bool) -> None:
    """Print a report, or its JSON and nothing else."""
    from flowcorr.instruments import page

    if as_json:
        print(page.as_json(report))
    else:
        page.show(report)


def allowed_imports(arguments: argparse.Namespace) -> list[str]:
    """The names of `--allow-import`; without any, the working directory is not searched for code."""
    if arguments.allow_import:
        find_own_code()
    return arguments.allow_import


def checked(arguments: argparse.Namespace) -> Config:
    """The configuration of the recipe on the command line, checked as far as that takes no model."""
    from flowcorr.config import load
    from flowcorr.instruments.plan.preflight import check_prompts, check_settings

    find_own_code()
    config = load(arguments.recipe, arguments.overrides)
    check_settings(config)
    check_prompts(config)
    return config


def writable_folder(out: str | None, default: Path, *, only_named: bool = False) -> Path:
    """The folder of `--out`, or its default, which can be made and written to; it is left as it was.

    Args:
        out: the option.
        default: without it.
        only_named: do not try, as another rank does.

    Raises:
        ConfigError: it is a file, or cannot be written to.
    """
    folder = _given(out, default)
    if only_named:
        return folder
    with _told(out, folder):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, and should be a folder")
        _try_writing(folder)
    return folder


def writable_file(out: str | None, default: Path) -> Path:
    """The file of `--out`, or its default, which can be written; nothing is left of the attempt.

    Raises:
        ConfigError: it is a folder, or its folder cannot be written to.
    """
    path = _given(out, default)
    with _told(out, path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder, and should be a file")
        _try_writing(path.parent)
    return path


def _given(out: str | None, default: Path) -> Path:
    if out is not None and not out.strip():
        raise ConfigError(f"--out {out!r} names no folder; give one, or leave --out away")
    return default if out is None else Path(out)


@contextlib.contextmanager
def _told(out: str | None, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # the latter of a zero byte in the path
        named = f"--out {out}" if out is not None else str(path)
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{named} cannot be written: {reason}; give --out a path that can be") from error


def _try_writing(folder: Path) -> None:
    """Make a folder and a file in it, and remove both; permissions alone do not tell of read-only file systems."""
    missing = list(itertools.takewhile(lambda part: not part.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for part in missing:
            with contextlib.suppress(OSError):
                part.rmdir()
