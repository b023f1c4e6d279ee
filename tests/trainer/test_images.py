"""Grids of samples."""

import numpy as np
import pytest
from PIL import Image

from flowcorr.errors import BackendError
from flowcorr.records import Prompt
from flowcorr.trainer.images import MAX_PICTURES, Shown, before_after, image_grid, labelled, save_image
from tests.prompts import prompts_of


def shown(images, prompts, scores=None):
    return labelled(Shown(images=images, prompts=prompts, scores=scores))


def pictures(count, height=32, width=64, scores=True):
    images = np.full((count, height, width, 3), 200, dtype=np.uint8)
    prompts = [Prompt(text=f"a sign {index}", target=f"word {index}") for index in range(count)]
    return shown(images, prompts, np.linspace(0, 1, count) if scores else None)


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(32, 64, (128, 64)), (32, 32, (128, 128)), (100, 200, (200, 100)), (512, 1024, (256, 128))],
)
def test_small_images_are_enlarged_and_large_ones_reduced(height, width, size):
    picture = pictures(1, height, width)[0]
    assert picture.size == (size[0], size[1] + 18)
    assert picture.getpixel((5, 5)) == (200, 200, 200)


def test_references_stand_beside_the_image():
    images = np.full((2, 32, 64, 3), 200, dtype=np.uint8)
    edits = prompts_of(["make it red", "add a cat"], images=2)
    for picture, edit in zip(shown(images, edits), edits, strict=True):
        assert picture.size == (3 * 128, 64 + 18)
        pixels = np.asarray(picture)[:64]
        np.testing.assert_array_equal(pixels[::2, :128:2], np.asarray(edit.images[0].fitted(32, 64)))
        np.testing.assert_array_equal(pixels[::2, 128:256:2], np.asarray(edit.images[1].fitted(32, 64)))
        assert (pixels[:, 256:] == 200).all()


def test_the_caption_is_the_target_or_the_text_with_its_score():
    images = np.zeros((3, 32, 64, 3), dtype=np.uint8)
    with_target, without, other = (Prompt(text="cat", target=target) for target in ("cat", None, "dog"))
    one, two, three = shown(images, [with_target, without, other])
    assert one.tobytes() == two.tobytes() != three.tobytes()
    scored = shown(images, [with_target, without, other], np.array([0.5, 0.5, np.nan]))
    assert one.tobytes() != scored[0].tobytes()


@pytest.mark.parametrize("text", ["a cat that reads " * 50, "W" * 100, "a\ncat " * 100])
def test_a_long_prompt_leaves_room_for_its_score(text):
    images = np.zeros((2, 32, 64, 3), dtype=np.uint8)
    low, high = shown(images, [Prompt(text=text)] * 2, np.array([0.25, 0.75]))
    assert low.tobytes() != high.tobytes()
    for picture in (low, high):
        assert (np.asarray(picture)[64:, -2:] == 255).all()  # no letter is cut


def test_a_grid_has_rows_of_columns():
    grid = image_grid(pictures(10), columns=4)
    assert grid.size == (4 * 132 - 4, 3 * 86 - 4)
    assert grid.getpixel((1 * 132 + 1, 2 * 86 + 1)) == (200, 200, 200)  # the tenth
    assert grid.getpixel((2 * 132 + 1, 2 * 86 + 1)) == (255, 255, 255)  # no eleventh
    assert image_grid(pictures(2, scores=False)).size == (2 * 132 - 4, 82)


def test_a_grid_stays_small():
    assert len(pictures(100)) == MAX_PICTURES


@pytest.mark.parametrize(
    ("width", "size", "first", "second"),
    [(100, (224, 64), (50, 60), (174, 60)), (1600, (1600, 152), (50, 60), (50, 148))],
)
def test_before_and_after_are_joined(width, size, first, second, tmp_path):
    """Beside each other; wide ones one above the other."""
    before_after(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for name, shade in (("before", "red"), ("after", "blue")):
        save_image(Image.new("RGB", (width, 40), shade), tmp_path / f"eval_{name}.png")
    before_after(tmp_path)
    with Image.open(tmp_path / "before_after.png") as joined:
        assert joined.size == size
        assert joined.getpixel(first) == (255, 0, 0)
        assert joined.getpixel(second) == (0, 0, 255)


@pytest.mark.parametrize("kept", [0, 20, 100])
def test_a_picture_that_a_crash_cut_off_ends_no_run(tmp_path, caplog, kept):
    for name in ("before", "after"):
        save_image(Image.new("RGB", (100, 40), "red"), tmp_path / f"eval_{name}.png")
    torn = tmp_path / "eval_before.png"
    torn.write_bytes(torn.read_bytes()[:kept])
    before_after(tmp_path)
    assert not (tmp_path / "before_after.png").exists()
    assert str(torn) in caplog.text


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "images").write_text("a file")
    with pytest.raises(BackendError, match=r"images/grid\.png .*\(File exists\)"):
        save_image(Image.new("RGB", (1, 1)), tmp_path / "images" / "grid.png")


def test_a_video_shows_its_first_middle_and_last_frame():
    levels = np.array([0, 50, 100, 150, 200], dtype=np.uint8)
    videos = np.broadcast_to(levels[None, :, None, None, None], (7, 5, 32, 64, 3))
    pictures = shown(videos, [Prompt(text="a cat")] * 7)
    frames = [pictures[0].getpixel((x, 10)) for x in (64, 132 + 64, 264 + 64)]
    assert frames == [(0,) * 3, (100,) * 3, (200,) * 3]
    assert image_grid(pictures).width == 5 * (pictures[0].width + 4) - 4  # 2048 pixels hold five of them
    one = shown(videos[:1, :1], [Prompt(text="a cat")])
    assert one[0].width == 128
