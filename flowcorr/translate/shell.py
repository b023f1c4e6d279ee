"""Reads the Hydra overrides of a shell script without running it.

A variable is replaced by the value that the script assigns to it, and `${NAME:-default}` by its default; the
environment is ignored. Of an `if`, only the `else` branch is read. Functions and loops are skipped. A variable without
a value stays as it is written.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from collections.abc import Iterator, Mapping

from flowcorr.errors import ConfigError

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n.*?\n\s*\1\b", re.DOTALL)
_VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\}|([A-Za-z_]\w*)")
_ARRAY = re.compile(r'"?\$\{([A-Za-z_]\w*)\[@\]\}"?')
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def read_command(text: str, module: str) -> tuple[str, list[str]]:
    """Find the arguments of `python -m MODULE...` in a script.

    Args:
        text: the script.
        module: the beginning of the module's name.

    Returns:
        The module and its arguments.

    Raises:
        ConfigError: the script has no such command.
    """
    variables: dict[str, str] = {}
    arrays: dict[str, str] = {}
    for line in _active_lines(text):
        command = re.search(rf"-m\s+({re.escape(module)}\S*)(.*)", line, re.DOTALL)
        if command:
            rest = _ARRAY.sub(lambda match: arrays.get(match[1], ""), command[2])
            words = [word for word in words_of(rest, variables) if "=" in word]
            return command[1], words
        assignment = _ASSIGNMENT.fullmatch(line)
        if assignment and assignment[2].startswith("("):
            arrays[assignment[1]] = assignment[2].strip("()")
        elif assignment:
            with contextlib.suppress(ConfigError):  # an unreadable variable stays as it is written
                variables[assignment[1]] = " ".join(words_of(assignment[2], variables))
    raise ConfigError(
        f"none of its commands runs python -m {module}...; if it calls another script, translate that one and append "
        "the overrides of the call"
    )


def words_of(text: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a command up to a pipe, a redirection or its end, without quotes and with variables replaced.

    Raises:
        ConfigError: a quote is not closed.
    """
    words, word, at = [], "", 0
    begun = False
    while at < len(text):
        char = text[at]
        if char == "'":
            end = _end_of(text, "'", at + 1)
            word, at, begun = word + text[at + 1 : end], end + 1, True
        elif char == '"':
            quoted, at = _double_quoted(text, at + 1, variables)
            word, begun = word + quoted, True
        elif char == "\\":
            word, at, begun = word + text[at + 1 : at + 2], at + 2, True
        elif char == "$":
            value, at = _expanded(text, at, variables)
            word, begun = word + value, True
        elif char.isspace() or char in "|;&<>#":
            if begun and char in "<>" and word.isdigit():
                begun = False  # of a redirection such as 2>&1
            if begun:
                words.append(word)
            word, begun, at = "", False, at + 1
            if not char.isspace():
                return words
        else:
            word, at, begun = word + char, at + 1, True
    return [*words, word] if begun else words


def arithmetic(node: ast.expr, value_of: Mapping[str, float]) -> float:
    """The result of arithmetic on numbers and names.

    Raises:
        ValueError: `node` is not such arithmetic.
    """
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in value_of:
            return value_of[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -arithmetic(operand, value_of)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](arithmetic(left, value_of), arithmetic(right, value_of))
    raise ValueError(f"{ast.unparse(node)} is not arithmetic on known numbers")


def _active_lines(text: str) -> Iterator[str]:
    """Whole commands, without comments, heredocs and skipped blocks."""
    text = _HEREDOC.sub("", text).replace("\\\n", " ")
    text = re.sub(r"(\w=\()([^()]*)\)", lambda match: match[0].replace("\n", " "), text)
    unread: list[str] = []  # the words that end the skipped blocks, innermost last
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        first = re.split(r"[\s;]", line)[0]
        if first == "if" and not re.search(r"\bfi$", line):
            unread.append("fi")
        elif first in ("for", "while", "until") and not re.search(r"\bdone\b", line):
            unread.append("done")
        elif first == "case":
            unread.append("esac")
        elif re.match(r"(function\s+)?[\w-]+\s*\(\)\s*\{?$", line):
            unread.append("}")
        elif unread and unread[-1] == "fi" and first == "else":
            unread[-1] = "else: fi"
        elif unread and first == unread[-1].removeprefix("else: "):
            unread.pop()
        elif all(end.startswith("else") for end in unread):
            yield line


def _double_quoted(text: str, at: int, variables: Mapping[str, str]) -> tuple[str, int]:
    word = ""
    while text[at : at + 1] != '"':
        if at >= len(text):
            raise ConfigError(f"a quote is not closed: {text[:60]}")
        if text[at] == "\\" and text[at + 1] in '"\\$`':
            word, at = word + text[at + 1], at + 2
        elif text[at] == "$":
            value, at = _expanded(text, at, variables)
            word += value
        else:
            word, at = word + text[at], at + 1
    return word, at + 1


def _expanded(text: str, at: int, variables: Mapping[str, str]) -> tuple[str, int]:
    """The value of the `$...` at position `at`, and the position after it."""
    if text.startswith("$((", at):
        end = _end_of(text, "))", at)
        return _computed(text[at + 3 : end], variables), end + 2
    if text.startswith("$(", at):
        end, depth = at + 2, 1
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        return text[at:end], end
    match = _VARIABLE.match(text, at + 1)
    if match is None:
        return text[at : at + 2], at + 2
    name = match[1] or match[3]
    value = variables.get(name) or match[2]
    if value is None:
        return f"${name}", match.end()
    return " ".join(words_of(value, variables)) if "$" in value else value, match.end()


def _end_of(text: str, sign: str, at: int) -> int:
    end = text.find(sign, at)
    if end < 0:
        raise ConfigError(f"a quote is not closed: {text[:60]}")
    return end


def _computed(text: str, variables: Mapping[str, str]) -> str:
    names = {name: float(value) for name, value in variables.items() if re.fullmatch(r"-?\d+", value)}
    try:
        expression = ast.parse(re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip(), mode="eval").body
        return str(int(arithmetic(expression, names)))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return f"$(({text}))"
