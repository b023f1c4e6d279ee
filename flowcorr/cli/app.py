"""Arguments, help and exit codes of `flowcorr`."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TextIO

import flowcorr
from flowcorr.cli import completion, instruments, recipes, running
from flowcorr.errors import ConfigError, FlowcorrError, printable, unknown_choice

COMMANDS = (*running.COMMANDS, *instruments.COMMANDS, *recipes.COMMANDS, *completion.COMMANDS)
OPTIONS = ("-h", "--help", "--version")
EXIT_FAILED, EXIT_USAGE, EXIT_SIGNAL = 1, 2, 128

_FIRST_DAY = """\
flowcorr train tiny_ocr_lora             train an embedded model on this machine
flowcorr report runs/tiny_ocr_lora       what it learned, and what to mend
flowcorr audit tiny_ocr_lora             how far the rollout engine is off

flowcorr --help lists all commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        try:
            # Where standard error is closed, `print` would write its messages among the results.
            with contextlib.redirect_stderr(sys.stderr or io.StringIO()):
                return _run(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:  # None where it was closed before the start
                sys.stdout.flush()  # here, as Python at its exit would print an error of its own
    except UnicodeEncodeError as error:
        lost = error.object[error.start : error.end]
        print(
            f"flowcorr: error: standard output is in {error.encoding}, which has no {lost!r}; set "
            "PYTHONIOENCODING=utf-8:backslashreplace",
            file=sys.stderr,
        )
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of the pipe, such as `head`, has exited: print nothing more, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(words: Sequence[str]) -> int:
    if not words:
        print(_FIRST_DAY)
        return EXIT_USAGE
    arguments = parse(words)
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")  # hides their advice about optional packages
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # the same
    rank = int(os.environ.get("RANK", "0"))  # only rank 0 logs warnings
    level = logging.ERROR if rank else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    for name in ("flowcorr.rollout", "flowcorr.workers"):  # a large engine loads for minutes
        logging.getLogger(name).setLevel(logging.ERROR if rank else logging.INFO)
    with warnings.catch_warnings():
        warnings.showwarning = _show_no_warning if rank else partial(_show_warning, set())
        try:
            return arguments.command(arguments)
        except FlowcorrError as error:
            print(f"flowcorr: error{f' on rank {rank}' if rank else ''}: {_shown(error)}", file=sys.stderr)
            return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_SIGNAL + 2


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; a line that is none exits with a message that names the one to type."""
    parser = build_parser()
    if words[0] not in (*parser.commands, *OPTIONS):
        parser.error(_command_of(words, parser.commands))
    arguments, rest = parser.parse_known_args(words)
    _take_late_overrides(parser, arguments, rest)
    return arguments


class Parser(argparse.ArgumentParser):
    """A parser that tells the names of its commands."""

    commands: Sequence[str] = ()


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="flowcorr",
        description="FlowGRPO training for flow-matching models, with rollout correction.\n\n"
        "start here:\n  flowcorr train tiny_ocr_lora",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flowcorr {flowcorr.__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    for command in COMMANDS:
        of_command = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for argument in command.arguments:
            action = of_command.add_argument(*argument.names, **argument.settings)
            if argument.settings.get("metavar") in completion.BY_METAVAR:
                action.complete = completion.BY_METAVAR[argument.settings["metavar"]]  # type: ignore[attr-defined]
        of_command.set_defaults(command=command.run, parser=parser)
    parser.commands = list(subparsers.choices)
    return parser


def _take_late_overrides(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str]
) -> None:
    """Accept `key=value` after an option too; argparse expects no positional arguments there."""
    unknown = [text for text in rest if text.startswith("-") or "=" not in text]
    if unknown or (rest and not hasattr(arguments, "overrides")):
        hint = _override_of(rest) if hasattr(arguments, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]


def _command_of(words: Sequence[str], commands: Sequence[str]) -> str:
    """The message for a first word that is no command, with the line that may be meant."""
    from flowcorr.config import find_recipe
    from flowcorr.trainer.run_config import CONFIG_FILE

    first = words[0]
    if first == "help":
        meant = [word for word in words[1:] if word in commands]
        return f"write {' '.join(['flowcorr', *meant, '--help'])}"
    if os.path.isfile(os.path.join(first, CONFIG_FILE)):
        return f"{first} is the folder of a run; write flowcorr report {shlex.quote(first)}"
    with contextlib.suppress(ConfigError):
        find_recipe(first)
        return f"{first} is a recipe; write {shlex.join(['flowcorr', 'train', *words])}"
    return unknown_choice("COMMAND", first, [*commands, *OPTIONS[1:]])


def _override_of(words: Sequence[str]) -> str:
    """The override that the first words may mean, `--trainer.seed=1` or `--steps 3`; empty if none."""
    from flowcorr.config import defaults, dotted

    name, _, value = (words[0] if "=" in words[0] else "=".join(words[:2])).lstrip("-").partition("=")
    is_number = value[:1].isdecimal()
    candidates = []
    for key, default in dotted(defaults()).items():
        last = key.rpartition(".")[2]
        if name and (name == key or name in last):
            other_kind = isinstance(default, int | float) is not is_number
            candidates.append((name not in (key, last), other_kind, len(last), key))
    return f" (did you mean {min(candidates)[-1]}={value or 'true'}?)" if candidates else ""


def _show_warning(
    shown: set[str],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning, once a command: files are read, and keys are checked, by several parts of it."""
    if (text := _shown(message)) not in shown:
        shown.add(text)
        print(f"flowcorr: warning: {text}", file=sys.stderr)


def _shown(message: object) -> str:
    return "\n".join(map(printable, str(message).split("\n")))


def _show_no_warning(*_: object, **__: object) -> None:
    """Print nothing: the main rank prints the warning."""
