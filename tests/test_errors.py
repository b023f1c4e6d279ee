import pickle

import pytest

from flowcorr import errors
from flowcorr.errors import FlowcorrError, MissingExtraError

EXAMPLES = [
    kind("the key is wrong")
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FlowcorrError) and kind is not MissingExtraError
]
EXAMPLES += [
    MissingExtraError("reward ocr", "rapidocr", "ocr"),
    MissingExtraError("reward ocr", "rapidocr", "ocr", ImportError("libGL.so.1: cannot open")),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_travel_from_workers_as_they_are(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_control_characters_are_escaped():
    assert errors.printable("a\x1b[31m\nb\udcff ä") == "a\\x1b[31m\\nb\\udcff ä"


def test_broken_bytes_are_escaped_in_what_is_written():
    assert errors.as_utf8("caf\udce9\nä") == "caf\\udce9\nä"


@pytest.mark.parametrize(
    ("value", "hint"),
    [("actor.lrr", " (did you mean actor.lr?)"), ("actor.zzz", ""), ("acto.lr", " (did you mean actor.lr?)")],
)
def test_what_all_choices_begin_with_makes_none_alike(value, hint):
    assert errors.unknown_choice("key", value, ["actor.lr", "actor.ema"]).startswith(
        f"key={value!r} is unknown{hint}; choose from actor.lr, actor.ema"
    )


@pytest.mark.parametrize(
    ("text", "meant"), [("a100-80", "a100-80gb"), ("H100-80", "h100-80gb"), ("4090", "rtx4090"), ("x", "")]
)
def test_a_name_that_begins_like_the_text_is_nearer_than_one_spelled_like_it(text, meant):
    assert errors.nearest(text, ["h100-80gb", "a100-80gb", "rtx4090"]) == meant


def test_a_name_of_initials_is_nearer_than_one_spelled_alike():
    assert errors.nearest("learning_rate", ["lr_min_ratio", "lr_schedule", "lr"]) == "lr"
    assert errors.nearest("lr_schedul", ["lr_min_ratio", "lr_schedule", "ls"]) == "lr_schedule"
