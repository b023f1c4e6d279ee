"""Reads the Hydra overrides of a shell script without running it.

A variable is replaced by the value that the script assigned to it before. Of an `if`, the branch is read that its
comparison of known values chooses. Where that is not known, whatever a branch assigns is unread, as it is in a loop or
a `case`. Functions are not read. See `shell_words` for quotes and variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from flowcorr.errors import ConfigError
from flowcorr.translate.shell_commands import ASSIGNMENT, Array, Commands, Item, is_assignment, text_of
from flowcorr.translate.shell_words import Value, Variables, Word, expand, expand_to_one
from flowcorr.translate.unread import Unread

Mode = Literal["runs", "may run", "does not run"]
_MAX_CHARACTERS, _MAX_COMMANDS, _MAX_BLOCKS = 2_000_000, 20_000, 50
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_GOES = ("cd", "pushd", "popd")
_READS = ("read", "mapfile", "readarray", "getopts", "let", "unset")
_ENDS = {
    "for": "done",
    "while": "done",
    "until": "done",
    "select": "done",
    "if": "fi",
    "case": "esac",
    "{": "}",
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a script.

    Attributes:
        module: the module that it runs.
        words: the words behind the module.
        line: its line in the script.
        not_read: commands before it that may assign variables or change the folder, such as `source`, with their lines.
    """

    module: str
    words: Sequence[Value]
    line: int
    not_read: Sequence[str]


def read_command(text: str, module: str) -> Command:
    """Find the command `python -m MODULE...` of a script.

    Args:
        text: the script.
        module: the beginning of the module's name.

    Raises:
        ConfigError: the script cannot be read, or has no such command, or several; the message names the line.
    """
    reader = _Reader(text, module)
    reader.read()
    if len(reader.found) > 1:
        lines = ", ".join(str(command.line) for command in reader.found)
        raise ConfigError(f"lines {lines} all run python -m {module}...; leave the one to translate")
    if reader.found:
        return reader.found[0]
    if reader.unsure:
        raise ConfigError(
            f"line {reader.unsure[0]}: python -m {module}... runs in a condition, a loop or a function that cannot be "
            "read; leave the one command to translate, outside of them"
        )
    raise ConfigError(
        f"none of its commands runs python -m {module}...; if it calls another script, translate that one and append "
        "the overrides of the call"
    )


@dataclass(slots=True)
class _Block:
    """A compound command that is open.

    Attributes:
        end: the word that ends it.
        line: the line that it begins in.
        mode: whether its commands run.
        taken: whether a branch of an `if` before this one ran.
        unsure: whether a branch of an `if` before this one may have run.
        patterns: whether a pattern of a `case` comes next.
        function: the function whose body it is.
        saved: the variables before a subshell, which changes only its own.
    """

    end: str
    line: int
    mode: Mode
    taken: bool = False
    unsure: bool = False
    patterns: bool = False
    function: str = ""
    saved: Variables | None = None


class _Reader:
    """Reads a script once, from top to bottom."""

    def __init__(self, text: str, module: str) -> None:
        self.found: list[Command] = []
        self.unsure: list[int] = []
        self._module = module
        self._commands = Commands(text)
        self._variables: Variables = {"HOME": "~", "PWD": "."}
        self._functions: dict[str, set[str]] = {}  # the variables that each function assigns
        self._blocks: list[_Block] = []
        self._not_read: list[str] = []
        self._status: bool | None = None  # of the last command
        self._sign = ""  # after the last command
        self._function = ""  # whose body begins next
        self._spent = 0
        self._exits = False

    def read(self) -> None:
        sign, number = ";", 0
        while sign and not self._exits:
            number += 1
            if number > _MAX_COMMANDS:
                raise ConfigError(f"line {self._commands.line}: it has more than {_MAX_COMMANDS} commands")
            if self._blocks and self._blocks[-1].patterns:
                self._blocks[-1].patterns = False
                self._commands.skip_pattern()
            items, sign = self._commands.next()
            line = items[0].line if items else self._commands.line
            if sign == "()":
                self._function = text_of(items[-1])
                continue
            if items:
                self._compound(items, line)
            if sign == "(":
                self._open(line, ")", saved=dict(self._variables))
            elif sign == ")":
                self._close(line, ")")
            elif sign in (";;", ";&", ";;&") and self._blocks:
                self._blocks[-1].patterns = self._blocks[-1].end == "esac"
            if items or sign != "\n":
                self._sign = sign
        if self._blocks and not self._exits:
            block = self._blocks[-1]
            raise ConfigError(f"line {block.line}: what begins here is not ended by {block.end}")

    def _compound(self, items: list[Item], line: int) -> None:
        """Read a command that may begin or end a compound one."""
        negated = False
        while items:
            first = text_of(items[0])
            if first in ("then", "else", "elif"):
                self._branch(first, line)
            elif first in ("do", "time"):
                pass
            elif first == "!":
                negated = not negated
            elif first == "{":
                self._open(line, "}")
            elif first in ("fi", "done", "esac", "}"):
                self._close(line, first)
                return
            elif first == "function" and len(items) > 1:
                self._function = text_of(items[1])
                items = items[1:]
            elif first in _ENDS:
                self._open(line, _ENDS[first])
                if first not in ("if", "while", "until"):
                    if first in ("for", "select") and len(items) > 1:
                        self._set(text_of(items[1]), None, self._mode(), line)
                    return
            else:
                self._simple(items, line)
                break
            items = items[1:]
        if negated and self._status is not None:
            self._status = not self._status

    def _open(self, line: int, end: str, *, saved: Variables | None = None) -> None:
        function, self._function = self._function, ""
        if len(self._blocks) == _MAX_BLOCKS:
            raise ConfigError(f"line {line}: it is nested more than {_MAX_BLOCKS} levels deep")
        mode: Mode = "does not run" if function else "may run" if end in ("done", "esac") else "runs"
        self._blocks.append(_Block(end, line, mode, function=function, saved=saved, patterns=end == "esac"))
        if function:
            self._functions.setdefault(function, set())

    def _close(self, line: int, end: str) -> None:
        if not self._blocks or self._blocks[-1].end != end:
            raise ConfigError(f"line {line}: {end} ends nothing here")
        block = self._blocks.pop()
        if block.saved is not None:
            self._variables = block.saved
        self._status = None

    def _branch(self, word: str, line: int) -> None:
        """`then`, `elif` or `else`: decide whether the commands behind it run."""
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.end != "fi":
            raise ConfigError(f"line {line}: {word} belongs to no if")
        if word != "then":
            block.mode = "does not run" if block.taken else "may run" if block.unsure else "runs"
        elif block.mode == "runs":
            block.mode = "may run" if self._status is None else "runs" if self._status else "does not run"
            block.taken, block.unsure = self._status is True, block.unsure or self._status is None

    def _mode(self) -> Mode:
        """Whether the next command runs, by the blocks that it is in and the command before it."""
        modes = [block.mode for block in self._blocks]
        if self._sign in ("&&", "||"):
            runs = None if self._status is None else self._status == (self._sign == "&&")
            modes.append("may run" if runs is None else "runs" if runs else "does not run")
        return next((mode for mode in ("does not run", "may run") if mode in modes), "runs")

    def _simple(self, items: Sequence[Item], line: int) -> None:
        mode, function = self._mode(), self._in_function()
        if mode == "does not run" and not function:
            return
        # Only what runs for certain may change variables by ${NAME:=value}.
        variables = self._variables if mode == "runs" else dict(self._variables)
        self._status = None
        if all(is_assignment(item) for item in items):
            for item in items:
                self._assign(item, mode, variables)
            self._status = True if mode == "runs" else None
            return
        words = [word for word in items if isinstance(word, Word)]
        fields = [field for word in words for field in self._expanded(word, variables)]
        module = next(
            (
                index + 1
                for index, (flag, name) in enumerate(pairwise(map(str, fields)))
                if flag == "-m" and name.startswith(self._module)
            ),
            None,
        )
        name = str(fields[0]) if fields else ""
        if module is not None and mode == "runs":
            self.found.append(
                Command(
                    module=str(fields[module]),
                    words=fields[module + 1 :],
                    line=line,
                    not_read=tuple(self._not_read),
                )
            )
        elif module is not None:
            self.unsure.append(line)
        elif name in _DECLARES:
            for item in filter(is_assignment, items[1:]):
                self._assign(item, mode, variables)
        elif name in ("source", ".", "eval", *_GOES):
            if name in _GOES:
                self._set("PWD", None, mode, line)
            self._not_read.append(f"line {line}: {' '.join(map(str, fields))}")
        elif mode == "runs" and name in ("true", "false", ":"):
            self._status = name != "false"
        elif mode == "runs" and name in ("[", "[[", "test"):
            self._status = _test(fields[1:] if name == "test" else fields[1:-1])
        else:
            for variable in self._changed_by(name, list(map(str, fields))):
                self._set(variable, None, mode, line)
        if name in ("exit", "return", "exec") and mode == "runs" and (name != "exec" or len(fields) > 1):
            self._exits = True

    def _changed_by(self, name: str, fields: Sequence[str]) -> Iterable[str]:
        """The variables that a command of the shell gives values that cannot be read."""
        if name in self._functions:
            return tuple(self._functions[name])
        if name in _READS:
            return re.findall(r"\b[A-Za-z_]\w*", " ".join(field for field in fields[1:] if field[:1] != "-"))
        if name == "printf" and fields[1:2] == ["-v"]:
            return fields[2:3]
        return re.findall(r"[A-Za-z_]\w*", name) if name.startswith("((") else ()

    def _assign(self, item: Item, mode: Mode, variables: Variables) -> None:
        if isinstance(item, Array):
            self._assign_array(item, mode, variables)
            return
        begin = ASSIGNMENT.match(str(item.parts[0]))
        assert begin is not None, "the caller has seen that it is an assignment"
        value = expand_to_one(Word((begin[3], *item.parts[1:]), item.line), variables)
        self._spend(value, item.line)
        if begin[2]:
            before = variables.get(begin[1], "")
            known = isinstance(before, str) and isinstance(value, str)
            self._set(begin[1], f"{before}{value}" if known else None, mode, item.line)
        else:
            self._set(begin[1], value, mode, item.line)

    def _assign_array(self, item: Array, mode: Mode, variables: Variables) -> None:
        if self._in_function():
            return
        name = f"{item.name}[@]"
        before = variables.get(name)
        kept = before if isinstance(before, list) else []
        new = [field for word in item.words for field in self._expanded(word, variables)]
        if mode == "runs":
            self._variables[name] = [*kept, *new] if item.appends else new
        else:
            reason = f"line {item.line}: only a shell could tell whether the array {item.name} holds it"
            self._variables[name] = [*kept, *(Unread(str(field), reason) for field in new)]

    def _set(self, name: str, value: Value | None, mode: Mode, line: int) -> None:
        """Give a variable a value; None is one that cannot be read, and so is one that it may not get."""
        if function := self._in_function():
            self._functions[function].add(name)
            return
        if value is None or (mode != "runs" and self._variables.get(name) != value):
            value = Unread(f"${name}", f"line {line}: only a shell could tell the value of ${name}")
        self._variables[name] = value

    def _in_function(self) -> str:
        return next((block.function for block in self._blocks if block.function), "")

    def _expanded(self, word: Word, variables: Variables) -> list[Value]:
        fields = expand(word, variables)
        for field in fields:
            self._spend(field, word.line)
        return fields

    def _spend(self, value: Value, line: int) -> None:
        self._spent += len(str(value)) + 1
        if self._spent > _MAX_CHARACTERS:
            raise ConfigError(
                f"line {line}: the values of the script make more than {_MAX_CHARACTERS} characters"
            )


def _test(fields: Sequence[Value]) -> bool | None:
    """The status of `[ ... ]`, or None if only a shell could tell."""
    words = [field for field in fields if isinstance(field, str)]
    if len(words) < len(fields):
        return None
    match words:
        case ["!", *rest] if rest:
            status = _test(rest)
            return None if status is None else not status
        case [] | ["-n"]:
            return False
        case ["-z"]:
            return True
        case [word] if not word.startswith("-"):
            return bool(word)
        case ["-z" | "-n" as sign, word]:
            return (word == "") == (sign == "-z")
        case [left, "=" | "==" | "!=" as sign, right] if not re.search(r"[*?\[]", right):
            return (left == right) == (sign != "!=")
        case [left, sign, right] if sign in _COMPARISONS and all(
            re.fullmatch(r"-?\d{1,18}", word) for word in (left, right)
        ):
            return _COMPARISONS[sign](int(left), int(right))
    return None
