"""Words of a shell script: their quotes, variables and arithmetic, read without running anything.

A `Word` is what the script writes; `expand` gives its value under the variables that the script has assigned so far.
The environment is ignored: `${NAME:-default}` is its default, and a variable without a value stays as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

from flowcorr.errors import ConfigError
from flowcorr.translate.unread import Unread

MAX_TEXT, _MAX_DEPTH, _MAX_NUMBER = 100_000, 20, 2**63
BLANKS, ENDS = " \t", " \t\n;&|<>()"
_PLAIN, _PLAIN_QUOTED = re.compile(r"[^ \t\n;&|<>()'\"\\`$]+"), re.compile(r'[^"\\`$]+')
_PLAIN_BRACED = re.compile(r"[^}'\"\\`$]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
_OPERATOR = re.compile(r":?[-=+?]")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    ast.Mod: lambda left, right: (abs(left) % abs(right)) * (1 if left >= 0 else -1),
}


@dataclass(frozen=True, slots=True)
class Variable:
    """`$NAME` or `${NAME...}`: `sign` is its operator, such as `:-`, and `other` the word behind it."""

    name: str
    sign: str
    other: Word
    quoted: bool
    text: str


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$((...))`."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A part that only the shell could tell, such as `$(date)`."""

    text: str


Part = str | Variable | Arithmetic | Opaque
Value = str | Unread
Variables = MutableMapping[str, Value | list[Value]]
"""Values by name; those of an array stand under `NAME[@]`."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command.

    Attributes:
        parts: text, and what is replaced by values.
        line: the line that it begins in, from 1.
    """

    parts: tuple[Part, ...]
    line: int


class Scanner:
    """The text of a script and a place in it."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self._ends = [match.start() for match in re.finditer("\n", self.text)]
        self._depth = 0

    @property
    def line(self) -> int:
        """The line of the place, from 1."""
        return bisect_right(self._ends, self.at - 1) + 1

    def peek(self, length: int = 1) -> str:
        """The next characters; fewer at the end."""
        return self.text[self.at : self.at + length]

    def skip(self, characters: str) -> None:
        """Go on to the first character that is not among these."""
        while self.peek() and self.peek() in characters:
            self.at += 1

    def skip_to(self, character: str) -> str:
        """Go on to the next such character, or to the end; the text before it is returned."""
        end = self.text.find(character, self.at)
        return self._take(end if end >= 0 else len(self.text))

    def skip_parentheses(self) -> bool:
        """Skip `()`, as behind the name of a function; False if they are not there."""
        match = re.compile(r"\(\s*\)\s*").match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match is not None

    def parenthesis(self) -> Word:
        """`(...)` at the place, as it is written."""
        line = self.line
        return Word((Opaque(self._balanced(line)),), line)

    def word(self) -> Word:
        """The word at the place; it may be empty."""
        line, parts = self.line, list[Part]()
        while (char := self.peek()) and char not in ENDS:
            parts += self._part(char)
        return Word(parts=tuple(parts), line=line)

    def _part(self, char: str) -> Sequence[Part]:
        line = self.line
        if char == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                raise _open_quote(line)
            return [self._take(end + 1)[1:-1]]
        if char == '"':
            return self._double_quoted(line)
        if char == "\\":
            taken = self._take(self.at + 2)
            return [] if taken == "\\\n" else [taken[1:]]
        if char == "`":
            end = self.text.find("`", self.at + 1)
            if end < 0:
                raise _open_quote(line)
            return [Opaque(self._take(end + 1))]
        if char == "$":
            return [self._dollar(quoted=False)]
        plain = _PLAIN.match(self.text, self.at)
        return [self._take(plain.end() if plain else self.at + 1)]

    def _double_quoted(self, line: int) -> Sequence[Part]:
        self.at += 1
        parts: list[Part] = [""]  # so that "" is a word
        while (char := self.peek()) != '"':
            if not char:
                raise _open_quote(line)
            if char == "\\":
                taken = self._take(self.at + 2)
                parts.append(
                    "" if taken == "\\\n" else taken[1:] if taken[1:] in ("$", "`", '"', "\\") else taken
                )
            elif char == "$":
                parts.append(self._dollar(quoted=True))
            elif char == "`":
                parts += self._part(char)
            else:
                plain = _PLAIN_QUOTED.match(self.text, self.at)
                parts.append(self._take(plain.end() if plain else self.at + 1))
        self.at += 1
        return parts

    def _dollar(self, *, quoted: bool) -> Part:
        """The `$...` at the place."""
        line, begin = self.line, self.at
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ConfigError(f"line {line}: it nests more than {_MAX_DEPTH} substitutions")
        try:
            if self.peek(3) == "$((":
                text = self._balanced(line)
                return Arithmetic(source=text[3:-2], text=text) if text.endswith("))") else Opaque(text)
            if self.peek(2) == "$(":
                text = self._balanced(line)
                if text[2:-1].strip() == "pwd":
                    return Variable(name="PWD", sign="", other=Word((), line), quoted=quoted, text=text)
                return Opaque(text)
            if self.peek(2) == "${":
                return self._braced(line, begin, quoted)
            if self.peek(2) in ("$'", '$"'):
                self.at += 1
                return Opaque("$" + "".join(map(str, self._part(self.peek()))))
            match = _PARAMETER.match(self.text, self.at + 1)
            if match is None:
                return self._take(self.at + 1)
            name = match[0] if _NAME.fullmatch(match[0]) else match[0][0]
            text = self._take(self.at + 1 + len(name))
            return Variable(name=name, sign="", other=Word((), line), quoted=quoted, text=text)
        finally:
            self._depth -= 1

    def _braced(self, line: int, begin: int, quoted: bool) -> Part:
        """`${...}`; of its operators, only those that give a default are known."""
        match = _PARAMETER.match(self.text, self.at + 2)
        after = match.end() if match else self.at + 2
        array = next((sign for sign in ("[@]", "[*]") if self.text.startswith(sign, after)), "")
        after += len(array)
        sign = _OPERATOR.match(self.text, after)
        if match is not None and self.text.startswith("}", after):
            self.at = after + 1
            return Variable(match[0] + array, "", Word((), line), quoted, self.text[begin : self.at])
        if match is not None and sign is not None and not array:
            self.at = sign.end()
            parts: list[Part] = []
            while (char := self.peek()) != "}":
                if not char:
                    raise _open_quote(line)
                plain = _PLAIN_BRACED.match(self.text, self.at)
                parts += [self._take(plain.end())] if plain else self._part(char)
            self.at += 1
            return Variable(match[0], sign[0], Word(tuple(parts), line), quoted, self.text[begin : self.at])
        return Opaque(self._balanced(line))

    def _balanced(self, line: int) -> str:
        """`(...)`, `$(...)` or `${...}` as it is written, with the parentheses, braces and quotes in it."""
        begin, open_signs = self.at, list[str]()
        self.at += self.peek() == "$"
        while True:
            char, last = self.peek(), open_signs[-1] if open_signs else ""
            if not char:
                raise _open_quote(line)
            if last == "'":
                if char == "'":
                    open_signs.pop()
            elif char == "\\":
                self.at += 1
            elif char == last:
                open_signs.pop()
            elif char in "({" and (last != '"' or self.text[self.at - 1] == "$"):
                open_signs.append(")" if char == "(" else "}")
            elif char == '"' or (char == "'" and last != '"'):
                open_signs.append(char)
            self.at += 1
            if not open_signs:
                return self.text[begin : self.at]

    def _take(self, end: int) -> str:
        taken = self.text[self.at : end]
        self.at = end
        return taken


def expand(word: Word, variables: Variables) -> list[Value]:
    """The words that a word becomes under `variables`, which `${NAME:=value}` may change.

    Raises:
        ConfigError: they are far longer than any command; the message names the line.
    """
    fields: list[Value] = []
    text, reason, is_word = "", "", False

    def end_word() -> None:
        nonlocal text, reason, is_word
        if is_word:
            fields.append(Unread(text, reason) if reason else text)
        text, reason, is_word = "", "", False

    for part in word.parts:
        if isinstance(part, str):
            text, is_word = text + part, True
            continue
        values, splits = _values(part, word.line, variables)
        if not values:
            is_word = is_word and bool(text)  # "$@" without arguments is no word
        for place, value in enumerate(values):
            if place:
                end_word()
            if isinstance(value, Unread):
                text, reason, is_word = text + value.text, reason or value.reason, True
                continue
            for index, piece in enumerate(re.split(r"\s+", value) if splits else [value]):
                if index:
                    end_word()
                text, is_word = text + piece, is_word or not splits or bool(piece)
        if len(text) + len(fields) > MAX_TEXT:
            raise ConfigError(f"line {word.line}: its variables make more than {MAX_TEXT} characters")
    end_word()
    return fields


def expand_to_one(word: Word, variables: Variables) -> Value:
    """The value that a word gives a variable: its words, joined by blanks."""
    fields = expand(word, variables)
    text = " ".join(map(str, fields))
    reasons = [field.reason for field in fields if isinstance(field, Unread)]
    return Unread(text, reasons[0]) if reasons else text


def _values(
    part: Variable | Arithmetic | Opaque, line: int, variables: Variables
) -> tuple[Sequence[Value], bool]:
    """The values of a part, and whether blanks in them end a word, as they do outside quotes."""
    if isinstance(part, Opaque):
        return [Unread(part.text, f"line {line}: only a shell could tell `{_short(part.text)}`")], False
    if isinstance(part, Arithmetic):
        return [_computed(part, line, variables)], False
    splits = not part.quoted
    if part.name in ("@", "*") or part.name.endswith("]"):
        found = variables.get(part.name.replace("*", "@"), [])
        return (found if isinstance(found, list) else [found]), False
    value = variables.get(part.name)
    assert not isinstance(value, list), "arrays have names of their own"
    given = value is not None and (value != "" or not part.sign.startswith(":"))
    if part.sign.endswith("+"):
        return [expand_to_one(part.other, variables) if given else ""], splits
    if value is not None and given:
        return [value], splits
    if part.sign.endswith(("-", "=")):
        default = expand_to_one(part.other, variables)
        if part.sign.endswith("="):
            variables[part.name] = default
        return [default], splits
    return [Unread(part.text, f"line {line}: the script does not assign ${part.name}")], False


def _computed(part: Arithmetic, line: int, variables: Variables) -> Value:
    """`$((...))` on whole numbers, as bash computes it."""
    try:
        source = re.sub(
            r"\$(?:\{(\w+)\}|(\w+))", lambda name: _digits(name[1] or name[2], variables), part.source
        )
        if len(source) > 200:
            raise ValueError("far longer than the arithmetic of a script")
        return str(_number(ast.parse(source.strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return Unread(part.text, f"line {line}: `{_short(part.text)}` is not arithmetic on known numbers")


def _digits(name: str, variables: Variables) -> str:
    """The value of a variable that is a whole number; raises `ValueError` for any other."""
    value = variables.get(name)
    if not isinstance(value, str) or not re.fullmatch(r"-?(0|[1-9]\d{0,18})", value):
        raise ValueError(f"{name} is no whole number")
    return value


def _number(node: ast.expr, variables: Variables) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            result = number
        case ast.Name(id=name):
            result = int(_digits(name, variables))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_number(operand, variables)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _number(left, variables), _number(right, variables)
            if not 0 <= exponent <= 64:
                raise ValueError(f"{exponent} is no exponent of such a number")
            result = base**exponent
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            result = _OPERATORS[type(sign)](_number(left, variables), _number(right, variables))
        case _:
            raise ValueError("no arithmetic")
    if abs(result) >= _MAX_NUMBER:
        raise ValueError("beyond the numbers of a shell")
    return result


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 60 else f"{one_line[:57]}..."


def _open_quote(line: int) -> ConfigError:
    return ConfigError(f"line {line}: a quote or a parenthesis is not closed")
