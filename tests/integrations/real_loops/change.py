"""Changes of a source text, by which a fault is planted and the lines of an example are put into another's loop.

A change is a file, a place (some words, and which of their occurrences; None for all), what is done there and a text:
`before` puts a line before the line of that place, `instead` replaces the words.
"""

Change = tuple[str, tuple[str, int | None], str, str]


def changed(source: str, at: tuple[str, int | None], how: str, text: str) -> str:
    """`source` with one change."""
    words, occurrence = at
    assert words in source, words
    if occurrence is None:
        return source.replace(words, text)
    place = -1
    for _ in range(occurrence + 1):
        place = source.index(words, place + 1)
    if how == "instead":
        return source[:place] + text + source[place + len(words) :]
    begin = source.rindex("\n", 0, place) + 1
    line = source[begin : source.index("\n", begin)]
    indent = line[: len(line) - len(line.lstrip())]
    return f"{source[:begin]}{indent}{text}\n{source[begin:]}"
