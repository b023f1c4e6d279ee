"""Quotes, variables and arithmetic of a shell."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.shell_words import Scanner, expand, expand_to_one
from flowcorr.translate.unread import Unread


def words(text, **variables):
    """The words that a text becomes, as text; one that is unread as its reason."""
    scanner, found = Scanner(text), []
    while scanner.peek():
        found += expand(scanner.word(), variables)
        scanner.skip(" \n")
    return [word.reason if isinstance(word, Unread) else word for word in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\ b 'c $X' d\"e", ["a b", "c $X", 'd"e']),
        (r'"a \"b\" \$X \n"', [r'a "b" $X \n']),
        ('"" a""b', ["", "ab"]),
        ("a\\\nb", ["ab"]),
        ("$X ${X} x${X}y", ["1", "1", "x1y"]),
        ("${X:-2} ${Y:-2} ${Y-$X} ${EMPTY:-3} x${EMPTY-3}", ["1", "2", "1", "3", "x"]),
        ("${Y:=5} $Y", ["5", "5"]),
        ("a${X:+b}c a${Y:+b}c", ["abc", "ac"]),
        ("${Y:-${Z:-a b}}", ["a", "b"]),
        ('$TWO "$TWO" x$TWO', ["a", "b", "a b", "xa", "b"]),
        ('"${ARRAY[@]}" ${NONE[@]} "$@"', ["p", "q r"]),
        (
            "$((X + 2 * 3)) $(( ${X}0 / 3 )) $((-7 / 2)) $((7 / 2 * 2)) $((-7 % 4))",
            ["7", "3", "-3", "6", "-3"],
        ),
        ("$", ["$"]),
        ('"$(pwd)/a" $( pwd )', ["/here/a", "/here"]),
    ],
)
def test_what_a_word_becomes(text, expected):
    variables = {"X": "1", "TWO": "a b", "EMPTY": "", "ARRAY[@]": ["p", "q r"], "PWD": "/here"}
    assert words(text, **variables) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\na$(date +'%Y)')b", "line 2: only a shell could tell `$(date +'%Y)')`"),
        ("`date`", "line 1: only a shell could tell `` `date` ``"),
        (
            '"$(cd "$(dirname "$0")" && pwd)"',
            'line 1: only a shell could tell `$(cd "$(dirname "$0")" && pwd)`',
        ),
        ("$Y", "line 1: the script does not assign $Y"),
        ("${Y:?give it}", "line 1: the script does not assign $Y"),
        ("${X%.sh}", "line 1: only a shell could tell `${X%.sh}`"),
        ("${#X}", "line 1: only a shell could tell `${#X}`"),
        ("$'\\n'", "line 1: only a shell could tell `$\\n`"),
        *(
            (text, f"line 1: `{text}` is not arithmetic on known numbers")
            for text in (
                "$((9**9**9))",
                "$((Y + 1))",
                "$((1 / 0))",
                "$((010))",
                "$((9223372036854775807 + 1))",
            )
        ),
    ],
)
def test_what_only_a_shell_could_tell_is_unread(text, reason):
    assert words(text, X="1")[-1].replace("`` ", "`").replace(" ``", "`") == reason.replace(
        "`` ", "`"
    ).replace(" ``", "`")


def test_a_value_keeps_the_text_of_what_is_unread():
    assert expand_to_one(Scanner("a$(pwd)/b").word(), {}).text == "a$(pwd)/b"


@pytest.mark.parametrize("text", ['a="b', "a='b", "a=$((1 + 2", "a=${b", "a=$(b", '"a\\', "`a"])
def test_an_open_quotation_is_refused_with_its_line(text):
    with pytest.raises(ConfigError, match="^line 3: a quote or a parenthesis is not closed$"):
        words(f"\n\n{text}")


def test_words_are_bounded():
    with pytest.raises(ConfigError, match="^line 1: its variables make more than 100000 characters$"):
        words("$X$X", X="x" * 60_000)
    with pytest.raises(ConfigError, match="^line 1: it nests more than 20 substitutions$"):
        words("${a:-" * 1000)
