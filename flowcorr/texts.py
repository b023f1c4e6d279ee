"""Texts as people read them: two spellings of one text are equal, and quoted words are a target.

Unicode writes one text in many ways: accents apart, full width, a typographic apostrophe, a no-break space. Prompts,
targets and what is read from images are compared as `folded` texts; what a model is given stays as it was written.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from typing import Any

from flowcorr.errors import ConfigError

# What a person reads as another text: x² is not x2, ½ not 1⁄2, ① not 1, ㎡ not m2.
_OTHER_TEXTS = {"<super>", "<sub>", "<fraction>", "<circle>", "<square>"}
_ONE_KEY = {
    "'": "\u2018\u2019\u201a\u201b\u02b9\u02bb\u02bc\u02bd\u2032\u2035\u00b4\u0060",
    '"': "\u201c\u201d\u201e\u201f\u2033\u2036\u301d\u301e\u301f",
    "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
}
_KEYS = {spelling: key for key, spellings in _ONE_KEY.items() for spelling in spellings}
# Behind an emoji, which is of these categories, they make another picture of it: a family, a flag.
_JOINERS, _EMOJI = {"\u200d", *map(chr, range(0xE0020, 0xE0080))}, {"So", "Sk"}
# Default_Ignorable_Code_Point of Unicode: soft hyphen, zero width, marks of direction, variation selectors, BOM, ...
_IGNORABLE = (
    *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F)),
    *((0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F)),
    *((0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A)),
    (0xE0000, 0xE0FFF),
)
_PAIRS = {
    '"': '"',
    "\uff02": "\uff02",
    "\u201c": "\u201d",
    "\u201e": "\u201c\u201d",
    "«": "»",
    "\u301d": "\u301e\u301f",
    "「": "」",
    "『": "』",
}
_MARKS = set("".join([*_PAIRS, *_PAIRS.values()]))


def folded(text: str) -> str:
    """Fold the spelling of a text: two texts that a person reads alike have one folded text.

    Accents are composed (NFC). Full and half width, ligatures, the no-break and other blanks, and letters of another
    font are folded as in NFKC, but not superscripts, subscripts, fractions, and numbers in circles. Typographic
    apostrophes, quotes and dashes become those of a keyboard. Characters that cannot be seen are dropped. Blanks at
    both ends are dropped, and each run of others is one space. Case is kept.
    """
    characters = map(_folded_character, unicodedata.normalize("NFD", text))
    return " ".join(unicodedata.normalize("NFC", _without_idle_joiners("".join(characters))).split())


def letters(text: str) -> str:
    """A folded text without case and blanks, for comparison with the text that is read in an image."""
    return folded("".join(folded(text).casefold().split()))


def quoted(text: str) -> str | None:
    """The words in the one pair of double quotes of a text; None without quotes, or with nothing in them.

    Raises:
        ConfigError: there are several quoted parts, marks that do not pair, or marks that are no quotes, as of inches;
            the message says which, and no more.
    """
    places = [place for place, character in enumerate(text) if character in _MARKS]
    if not places:
        return None
    marks = [text[place] for place in places]
    pairs = list(zip(marks[::2], marks[1::2], strict=False))
    if len(marks) % 2 or any(closing not in _PAIRS.get(opening, "") for opening, closing in pairs):
        raise ConfigError(f"its quotation marks {' '.join(marks)} do not pair")
    if len(pairs) > 1:
        raise ConfigError(f"it has {len(pairs)} quoted parts")
    before, words, after = text[: places[0]], text[places[0] + 1 : places[1]], text[places[1] + 1 :]
    if _ends_in_number(before, words):
        raise ConfigError(f"its {marks[0]} stands behind a number, as for inches")
    if (before[-1:].isalnum() and words[:1].isspace()) or (words[-1:].isspace() and after[:1].isalnum()):
        raise ConfigError(f"its {marks[0]} belongs to the words outside")
    if before.endswith("\\") or words.endswith("\\"):
        raise ConfigError(f"its {marks[0]} stands behind a backslash")
    return words if folded(words) else None


def _ends_in_number(before: str, words: str) -> bool:
    """Whether the first mark may stand for inches: `6" wide`, and `6 " wide`."""
    last = (before.rstrip() if words[:1].isspace() else before)[-1:]
    return bool(last) and unicodedata.category(last) in ("Nd", "No")


def _without_idle_joiners(text: str) -> str:
    """A text without joiners that follow no emoji."""
    if _JOINERS.isdisjoint(text):
        return text
    kept = [""]
    for character in text:
        if (
            character not in _JOINERS
            or kept[-1] in _JOINERS
            or unicodedata.category(kept[-1] or " ") in _EMOJI
        ):
            kept.append(character)
    return "".join(kept)


@functools.cache
def _folded_character(character: str) -> str:
    """The replacement of one character without accents; empty for an invisible one that is no joiner."""
    if character in _JOINERS:
        return character
    if character in _KEYS:
        return _KEYS[character]
    if any(first <= ord(character) <= last for first, last in _IGNORABLE):
        return ""
    if unicodedata.category(character) == "Cc" and not character.isspace():
        return ""
    tag, *codes = unicodedata.decomposition(character).split() or [""]
    if not tag or tag in _OTHER_TEXTS:
        return character
    parts = [chr(int(code, 16)) for code in (codes if tag.startswith("<") else (tag, *codes))]
    if parts[0] == " " and len(parts) > 1:  # an accent of its own, as ¨
        return character
    return "".join(map(_folded_character, parts))


def are_cut(texts: Sequence[str], tokenizer: Any, limit: int) -> list[bool]:
    """Whether each text has more than `limit` tokens, including the ones that a tokenizer adds."""
    return (
        [len(tokens) > limit for tokens in tokenizer(list(texts), verbose=False).input_ids] if texts else []
    )
