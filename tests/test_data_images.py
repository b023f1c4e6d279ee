"""Reference images of prompts: named by paths, decoded once, and refused with file and line."""

import json

import pytest
from PIL import Image

from flowcorr.data import prompts_digest, read_prompts
from flowcorr.errors import ConfigError
from flowcorr.references import Reference
from tests.test_data import load, write


def with_images(folder, *lines, name="prompts.jsonl"):
    """A file of prompts beside the images that it may name."""
    (folder / "pictures").mkdir(exist_ok=True)
    for number in range(8):
        Image.new("RGB", (32, 32), (30 * number, 0, 0)).save(folder / "pictures" / f"{number}.png")
    Image.new("1", (10_000, 10_000)).save(folder / "pictures" / "large.png")
    return write(folder, "\n".join(map(json.dumps, lines)), name)


def test_reference_images_are_named_relative_to_the_file(tmp_path, monkeypatch):
    path = with_images(
        tmp_path,
        {"prompt": "make it blue", "image": "pictures/0.png", "style": "ink"},
        {"prompt": "make it red", "images": [str(tmp_path / "pictures/1.png")]},
    )
    monkeypatch.chdir(tmp_path.parent)
    first, second = read_prompts(path)
    assert first.images == (Reference.of(tmp_path / "pictures/0.png"),)
    assert second.images == (Reference.of(tmp_path / "pictures/1.png"),)
    assert first.metadata == {"style": "ink"}


def test_a_prompt_is_its_text_and_its_images(tmp_path):
    edits = [{"prompt": "make it blue", "image": f"pictures/{number}.png"} for number in range(8)]
    split = load(with_images(tmp_path, *edits, {**edits[0], "prompt": "make  it blue"}), heldout_fraction=0.5)
    every = (*split.train, *split.heldout)
    assert len({prompt.key for prompt in every}) == 8
    assert {prompt.key for prompt in split.train}.isdisjoint(prompt.key for prompt in split.heldout)
    before = prompts_digest(split)
    (tmp_path / "pictures/0.png").rename(tmp_path / "moved.png")
    moved = [
        {**edits[0], "image": "moved.png"},
        *edits[1:],
        {"prompt": "make  it blue", "image": "moved.png"},
    ]
    path = write(tmp_path, "\n".join(map(json.dumps, moved)), "prompts.jsonl")
    assert prompts_digest(load(path, heldout_fraction=0.5)) == before
    Image.new("RGB", (32, 32), "white").save(tmp_path / "moved.png")
    assert prompts_digest(load(path, heldout_fraction=0.5)) != before


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"image": "gone.png"}, "gone.png does not exist"),
        ({"image": "prompts.jsonl"}, "prompts.jsonl is no image"),
        (
            {"image": "pictures/large.png"},
            "large.png .*10000 x 10000 ",
        ),  # Pillow warns, which is an error here
        ({"images": ["pictures/0.png", "pictures"]}, "pictures is a folder"),
        ({"image": "https://example.org/cat.png"}, "https://example.org/cat.png; download"),
        ({"image": ""}, '{"image": ""}; '),
        ({"images": []}, r'{"images": \[\]}; '),
        ({"images": "pictures/0.png"}, '{"images": "pictures/0.png"}; '),
        ({"image": ["pictures/0.png"]}, r'{"image": \["pictures/0.png"\]}; '),
        ({"image": "pictures/0.png", "images": ["pictures/1.png"]}, '{"image": "pictures/0.png", "images": '),
    ],
)
def test_a_bad_reference_is_named_by_file_and_line(tmp_path, line, named):
    path = with_images(tmp_path, {"prompt": "a", "image": "pictures/0.png"}, {"prompt": "b", **line})
    with pytest.raises(ConfigError, match=f"^{path}:2.*{named}"):
        read_prompts(path)


BASE64 = "iVBORw0KGgoAAAANSUhEUgAA" * 700


@pytest.mark.parametrize(
    "image",
    [
        f"data:image/png;base64,{BASE64}",
        BASE64,
        "data:image/png;base64,iVBO",
        {"bytes": BASE64, "path": None},
        [["cat.png"]],
        [BASE64],
        "x" * 300,
        f"https://a.b/{BASE64}",
    ],
)
def test_the_content_of_an_image_is_refused_in_one_short_line(tmp_path, image):
    key = "images" if isinstance(image, list) else "image"
    path = write(tmp_path, json.dumps({"prompt": "a", key: image}), "prompts.jsonl")
    with pytest.raises(ConfigError, match=rf"^{path}:1") as error:
        read_prompts(path)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


def test_prompts_have_equally_many_references(tmp_path):
    one = {"prompt": "a", "image": "pictures/0.png"}
    two = {"prompt": "b", "images": ["pictures/0.png", "pictures/1.png"]}
    path = with_images(tmp_path, one, two)
    with pytest.raises(ConfigError, match=f"^{path}:2 .* 2 .*{path}:1 .* 1;"):
        load(path)
    train, heldout = with_images(tmp_path, one), write(tmp_path, "a\n", "heldout.txt")
    with pytest.raises(ConfigError, match=f"^{heldout}:1 .* 0 .*{train}:1 .* 1;"):
        load(train, heldout_path=str(heldout))
