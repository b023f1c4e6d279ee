"""Commands of a shell script."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.shell_commands import Array, Commands, is_assignment, text_of


def commands(text):
    """All commands: the texts of their words, and the sign behind each."""
    reader, found, sign = Commands(text), [], ";"
    while sign:
        items, sign = reader.next()
        found.append(
            (" ".join(item.name if isinstance(item, Array) else text_of(item) for item in items), sign)
        )
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b # c; d\ne", [("a b", "\n"), ("e", "")]),
        ("a && b || c | d & e;f", [("a", "&&"), ("b", "||"), ("c", "|"), ("d", "&"), ("e", ";"), ("f", "")]),
        ("a 2>&1 >log <in &>/dev/null 3 > x b", [("a 3 b", "")]),
        ("a <<EOF b\nc d\nEOF\ne", [("a b", "\n"), ("e", "")]),
        ("a <<-'EOF'\nc\n  EOF\ne <<< word", [("a", "\n"), ("e", "")]),
        ("exec > >(tee -a log) 2>&1", [("exec", "")]),
        ("f() { a; }", [("f", "()"), ("{ a", ";"), ("}", "")]),
        ("(a)", [("", "("), ("a", ")"), ("", "")]),
        ("x=(1\n 2 # three\n) y", [("x y", "")]),
        ("[[ a && (b < c) ]] && d", [("[[ a && ( b < c ) ]]", "&&"), ("d", "")]),
        ("((i + 1)); a", [("", ";"), ("a", "")]),
        ("case a in\nb) c;; esac", [("case a in", ";"), ("", "\n"), ("b", ")"), ("c", ";;"), ("esac", "")]),
    ],
)
def test_words_and_signs(text, expected):
    assert commands(text) == expected


@pytest.mark.parametrize(
    ("text", "rest"), [(" (a|'b c') d", " d"), ("*) d", " d"), ("\n# a\nesac d", "esac d")]
)
def test_the_pattern_of_a_case(text, rest):
    reader = Commands(text)
    reader.skip_pattern()
    assert reader.text[reader.at :] == rest


def test_what_is_not_closed_is_refused_with_its_line():
    with pytest.raises(ConfigError, match="^line 2: the array x is not closed$"):
        commands("\nx=(1 2")
    with pytest.raises(ConfigError, match="^line 1: this pattern of a case cannot be read$"):
        Commands("a;b").skip_pattern()


def test_assignments():
    items, _ = Commands("a=1 b+=$c d=(1) 'e'=1 $f=2 g").next()
    assert [is_assignment(item) for item in items] == [True, True, True, False, False, False]
