"""Fields under other tools' names: told once, unless the line has what they mean."""

import json
import warnings

import pytest

from flowcorr.data import read_prompts
from flowcorr.records import Prompt
from flowcorr.records.spellings import meant, unread_images


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        *(
            (name, "image")
            for name in ("edit_image", "kontext_images", "image_path", "inputImage", "ref-img")
        ),
        *(
            (name, "negative_prompt")
            for name in ("neg_prompt", "negativ_prompt", "Negative Prompt", "uncond_prompt")
        ),
        *((name, "prompt") for name in ("caption", "captions", "text", "promt")),
        ("seed", "trainer.seed"),
        ("cfg_scale", "sampling.guidance_scale"),
        *(
            (name, None)
            for name in ("id", "prompt_id", "image_id", "category", "style", "include", "class", "source")
        ),
    ],
)
def test_a_name_of_other_tools(name, meaning):
    assert meant(name) == meaning


@pytest.fixture
def told(tmp_path):
    """A function from a file's lines to the fields that are told, each with the number of its lines and its remedy."""

    def read(*lines):
        path = tmp_path / "p.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read_prompts(path)
        return [str(warning.message).removeprefix(f"{path}: ") for warning in caught]

    return read


def test_each_field_is_told_once_with_its_remedy(told):
    lines = [{"prompt": f"a cat {n}", "neg_prompt": "x", "edit_image": "a", "seed": n} for n in range(3)]
    messages = told(*lines, {"prompt": "a dog"})
    assert ["of 3 of 4 lines" in message for message in messages] == [True] * 3
    remedies = ('rename it to "negative_prompt"', 'rename it to "image" or "images"', "set trainer.seed")
    assert all(
        message.startswith(f'the field "{name}"') and remedy in message
        for name, message, remedy in zip(
            ("neg_prompt", "edit_image", "seed"), messages, remedies, strict=True
        )
    )


def test_nothing_is_said_of_what_a_line_has(told):
    assert told({"prompt": "a", "caption": "b", "target": "c", "answer": "d", "tag": "e", "tags": "f"}) == []
    assert (
        told({"prompt": "a", "negative_prompt": "b", "neg_prompt": "c", "style": "d", "edit_image": None})
        == []
    )
    (message,) = told({"prompt": 'a sign "x"', "target_text": "y"})
    assert "set data.target_field=target_text" in message


@pytest.mark.parametrize(
    "value",
    ["cats/1.PNG", ["a.jpg", "b.webp"], "data:image/png;base64,iVBORw0KGgo=", {"bytes": None, "path": "x"}],
)
def test_images_are_known_by_their_values_too(value):
    assert unread_images(Prompt(text="make it red", metadata={"before": value})) == "before"
    assert unread_images(Prompt(text="make it red", metadata={"before": "noon", "style": 3})) is None
