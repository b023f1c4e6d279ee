"""Commands of a shell script: their words, and the signs between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flowcorr.errors import ConfigError
from flowcorr.translate.shell_words import Scanner, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SIGNS = (";;&", ";;", ";&", "&&", "||", "|&", ";", "&", "|")


@dataclass(frozen=True, slots=True)
class Array:
    """`NAME=(...)`, or `NAME+=(...)`, which appends."""

    name: str
    appends: bool
    words: Sequence[Word]
    line: int


Item = Word | Array


class Commands(Scanner):
    """The text of a script, read command by command."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._heredocs: list[str] = []  # the ends of those whose bodies follow the line

    def next(self) -> tuple[list[Item], str]:
        """The words of the next command, and the sign that ends it, which is empty at the end of the script.

        `()` is the sign behind the name of a function. Redirections are left out. `case WORD in` counts as a command,
        as does an arithmetic one, `((...))`.
        """
        items: list[Item] = []
        while char := self.peek():
            sign = next((sign for sign in _SIGNS if self.peek(len(sign)) == sign), "")
            in_test = bool(items) and text_of(items[0]) == "[[" and text_of(items[-1]) != "]]"
            if self.peek(2) == "\\\n":
                self.at += 2
            elif char in " \t":
                self.at += 1
            elif char == "#":
                self.skip_to("\n")
            elif in_test and (sign or char in "()<>"):
                items.append(Word((sign or char,), self.line))
                self.at += len(sign or char)
            elif char == "\n":
                self.at += 1
                self._skip_heredocs()
                return items, "\n"
            elif char in "<>" or self.peek(2) == "&>":
                if items and self.text[self.at - 1].isdigit() and text_of(items[-1]).isdigit():
                    del items[-1]  # the 2 of 2>&1
                self._skip_redirection()
            elif sign:
                self.at += len(sign)
                return items, sign
            elif char == ")":
                self.at += 1
                return items, ")"
            elif char == "(" and items and self.skip_parentheses():
                return items, "()"
            elif self.peek(2) == "((":
                items.append(self.parenthesis())
            elif char == "(":
                self.at += 1
                return items, "("
            else:
                items.append(self._item())
                if len(items) == 3 and (text_of(items[0]), text_of(items[2])) == ("case", "in"):
                    return items, ";"
        return items, ""

    def skip_pattern(self) -> None:
        """Skip a pattern of a `case` with its `)`, unless the end of the `case` comes next."""
        self.skip(" \t\n(")
        while self.peek() == "#":
            self.skip_to("\n")
            self.skip(" \t\n(")
        begin = self.at
        if text_of(self.word()) == "esac":
            self.at = begin
            return
        self.skip(" \t|")
        while self.peek() != ")":
            if not self.word().parts:
                raise ConfigError(f"line {self.line}: this pattern of a case cannot be read")
            self.skip(" \t|")
        self.at += 1

    def _item(self) -> Item:
        line, word = self.line, self.word()
        begin = ASSIGNMENT.fullmatch(text_of(word))
        if begin is None or begin[3] or self.peek() != "(":
            return word
        self.at += 1
        words: list[Word] = []
        while (char := self.peek()) != ")":
            if not char:
                raise ConfigError(f"line {line}: the array {begin[1]} is not closed")
            if char == "#":
                self.skip_to("\n")
            elif char in " \t\n;&|<>(":
                self.at += 1
            else:
                words.append(self.word())
        self.at += 1
        return Array(name=begin[1], appends=bool(begin[2]), words=words, line=line)

    def _skip_redirection(self) -> None:
        here = self.peek(2) == "<<" and self.peek(3) != "<<<"
        self.skip("<-" if here else "<>&|-")
        self.skip(" \t")
        if self.peek() == "(":
            self.parenthesis()
            return
        word = self.word()
        if here:
            self._heredocs.append("".join(part for part in word.parts if isinstance(part, str)))

    def _skip_heredocs(self) -> None:
        for end in self._heredocs:
            while self.peek() and self.skip_to("\n").strip() != end:
                self.at += 1
            self.at += 1
        self._heredocs.clear()


def text_of(item: Item) -> str:
    """The text of a word that has only one part, without its quotes; empty for any other."""
    parts = item.parts if isinstance(item, Word) else ()
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else ""


def is_assignment(item: Item) -> bool:
    """Whether a word has the form `NAME=value`, or is an array."""
    if isinstance(item, Array):
        return True
    begin = item.parts[0] if item.parts else ""
    return isinstance(begin, str) and ASSIGNMENT.match(begin) is not None
