import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcorr.errors import ConfigError
from flowcorr.records import distinct
from flowcorr.texts import folded, letters, quoted
from tests.prompts import prompts_of

SAME = [
    ("don't", "don\u2019t", "don\u2018t", "don\u02bct", "don\u00b4t", "don`t", "don\uff07t", "don\u2032t"),
    ('"Hi"', "\u201cHi\u201d", "\u201eHi\u201c", "\uff02Hi\uff02", "\u2033Hi\u2033", "\u301dHi\u301e"),
    ("café", "cafe\u0301", "cafe\u200b\u0301"),
    ("Open! 1:30", "Open\uff01 1\uff1a30", "\uff2f\uff50\uff45\uff4e\uff01\u30001:30"),
    ("ガ", "ｶﾞ", "カ\u3099"),
    ("a b", " a b", "a\u00a0b", "a \t b\u2009", "a\u3000b", "a\u202fb\n", "\ufeffa b"),
    (
        "ab",
        "a\u200bb",
        "a\u00adb",
        "a\u2060b",
        "\u202aab\u202c",
        "a\u200db",
        "\ufeffab",
        "a\ufe0fb",
        "a\x00b",
    ),
    ("1990-1995", "1990\u20131995", "1990\u20141995", "1990\u20111995", "1990\u22121995"),
    ("wait...", "wait\u2026"),
    ("fine", "\ufb01ne"),
    ("Hello", "\U0001d407\U0001d41e\U0001d425\U0001d425\U0001d428"),
    ("\u212a", "K"),
    ("❤", "❤\ufe0f"),
]
APART = [
    ("O", "0"),
    ("l", "1"),
    ("x2", "x²"),
    ("H2O", "H₂O"),
    ("m2", "㎡"),
    ("1", "①"),
    ("1/2", "½"),
    ("TM", "™"),
    ("cafe", "café"),
    ("a-b", "ab"),
    ("a b", "a_b"),
    ("а", "a"),  # Cyrillic
    ("\U0001f468\u200d\U0001f469", "\U0001f468\U0001f469"),  # a family, and two people
    ("¨", "\u0308"),
]


@pytest.mark.parametrize("spellings", SAME, ids=lambda spellings: spellings[0])
def test_spellings_of_a_text_are_one(spellings):
    assert {folded(text) for text in spellings} == {folded(spellings[0])}
    assert [prompt.text for prompt in distinct(prompts_of(spellings))] == [spellings[0]]


@pytest.mark.parametrize(("one", "other"), APART)
def test_other_texts_stay_apart(one, other):
    assert folded(one) != folded(other)
    assert letters(one) != letters(other)


def test_case_counts_in_prompts_and_not_in_letters():
    assert folded("A Cat") != folded("a cat")
    assert letters("A Cat") == letters("ac at") == letters("ACAT")
    assert letters("Straße") == letters("STRASSE")


def test_plain_text_is_left_alone():
    printable = "".join(map(chr, range(33, 127))).replace("`", "")
    assert folded(printable) == printable


def test_every_character_folds_once_and_for_all():
    assigned = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")
    ]
    assert len(assigned) > 140_000
    for character in assigned:
        once = folded(character)
        assert folded(once) == once
        assert folded(unicodedata.normalize("NFD", character)) == once


TEXTS = st.text() | st.text(alphabet=sorted({*"".join(map("".join, (*SAME, *APART)))}))


@given(TEXTS)
def test_folding_is_idempotent_and_blind_to_normal_forms(text):
    once = folded(text)
    assert folded(once) == once
    assert unicodedata.is_normalized("NFC", once)
    assert {folded(unicodedata.normalize(form, text)) for form in ("NFC", "NFD")} == {once}
    assert letters(letters(text)) == letters(text) == letters(once)


@given(TEXTS, TEXTS)
def test_blanks_around_and_what_is_not_seen_do_not_count(text, other):
    assert folded(f"\ufeff \u00a0{text}\u200b \n") == folded(text)
    assert (folded(text) == folded(other)) <= (letters(text) == letters(other))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a cat", None),
        ("it's Rosie's", None),
        ("a 6\u2033 ruler", None),
        ('a sign that says ""', None),
        ('a sign that says " \u200b"', None),
        ('"Hello"', "Hello"),
        ('a sign that says "Rosie\'s Diner", at night', "Rosie's Diner"),
        ("a “Daily” menu", "Daily"),
        ("ein „Hallo“ und", "Hallo"),
        ("写着\uff02你好\uff02的牌子", "你好"),
        ('写着"你好"的牌子', "你好"),
        ("「開店」の看板", "開店"),
        ("un panneau « Bonjour »", " Bonjour "),
        ('says " HELLO " in red', " HELLO "),
        ('Route 66 "Open 24"', "Open 24"),
        ('a 6\u2033 screen that shows "Hi"', "Hi"),
    ],
)
def test_the_quoted_words_are_exactly_those_of_the_text(text, words):
    assert quoted(text) == words


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('a sign that says "Hello', "do not pair"),
        ('a 6" ruler that says "Hi"', "do not pair"),
        ("a “Hello", "do not pair"),
        ("a “Hello“ sign", "do not pair"),
        ('a “Hello" sign', "do not pair"),
        ("a »Hello« sign", "do not pair"),
        ('"Open" above "Daily"', "2 quoted parts"),
        ("“Open” above 「開店」", "2 quoted parts"),
        ('"Open" above ""', "2 quoted parts"),
        ("“a “b” c”", "do not pair"),
        ('a 6" and a 12" ruler', "behind a number"),
        ("5'10\" beside 6'2\"", "behind a number"),
        ('6 " and 12 "', "behind a number"),
        ('a 6½" and a 7" nail', "behind a number"),
        ('Hello" he said, and "left', "words outside"),
        ('the "Hello "World', "words outside"),
        (r"a sign that says \"Hi\"", "backslash"),
    ],
)
def test_quotes_that_leave_a_choice_are_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        quoted(text)


@given(st.text(alphabet="ab1 \\\"'“”„«»「」\uff02\u2033\u2032\u00a0", max_size=12))
def test_spellings_of_a_prompt_never_have_different_targets(text):
    def target(spelling):
        try:
            return quoted(spelling)
        except ConfigError:
            return None

    straight = target(folded(text))
    assert target(text) is None or straight is None or letters(target(text)) == letters(straight)
