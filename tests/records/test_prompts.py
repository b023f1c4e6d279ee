"""Prompts that ask for one thing are one prompt."""

from PIL import Image

from flowcorr.records import Prompt, distinct
from flowcorr.references import Reference


def test_the_first_spelling_of_a_prompt_stays():
    prompts = [Prompt(text=text, target=text) for text in ("a  cat", "a dog", "a cat")]
    assert distinct(prompts) == prompts[:2]


def test_a_prompt_with_another_reference_image_asks_for_another_thing(tmp_path):
    references = []
    for name in ("red", "blue"):
        Image.new("RGB", (16, 16), name).save(tmp_path / f"{name}.png")
        references.append(Reference.of(tmp_path / f"{name}.png"))
    keys = {Prompt(text="make it snow", images=(image,)).key for image in references}
    assert len(keys) == 2


def test_the_place_of_a_prompt_is_no_part_of_it():
    assert Prompt(text="a cat", place="a.txt:1") == Prompt(text="a cat", place="b.txt:2")


def test_a_prompt_with_another_negative_prompt_is_another_request_for_one_content():
    prompts = [
        Prompt(text="a cat", negative_prompt=text) for text in (None, "", "blurry", "ugly", " blurry  ")
    ]
    assert distinct(prompts) == prompts[:4]
    assert len({prompt.content for prompt in prompts}) == 1
