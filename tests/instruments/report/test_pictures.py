"""The images of a run: of its own folder, and nothing but images."""

import base64
import os
import struct
import sys
import zlib

import numpy as np
import pytest
from instruments.run_folders import write_run
from PIL import Image

from flowcorr.instruments.report.pictures import MAX_FILM_BYTES, MAX_GRIDS, pictures
from flowcorr.instruments.report.runs import read_run
from flowcorr.records import Prompt
from flowcorr.trainer.images import Shown
from flowcorr.trainer.videos import save_film

ROLLOUTS = "rollouts at step 0"


@pytest.fixture
def folder(tmp_path):
    """A run with the images of a step."""
    return write_run(tmp_path / "run", images=1)


def captions(folder):
    return [picture.title for picture in pictures(read_run(folder))]


def left_out(folder, reason, name="before_after.png"):
    """The captions that are left after a warning."""
    with pytest.warns(UserWarning, match=f"images/{name} .*: .*{reason}"):
        return captions(folder)


def test_the_images_of_a_run_are_shown(folder):
    assert captions(folder) == ["held out, before and after", ROLLOUTS]


@pytest.mark.parametrize("kind", ["file", "image"])
def test_a_link_out_of_the_folder_is_not_followed(kind, folder, tmp_path):
    target = tmp_path / "private.png"
    if kind == "image":
        Image.new("RGB", (8, 8)).save(target)
    else:
        target.write_text("a private key")
    pair = folder / "images" / "before_after.png"
    pair.unlink()
    pair.symlink_to(target)
    assert left_out(folder, "it is a link") == [ROLLOUTS]


def test_a_folder_of_images_elsewhere_is_not_shown(folder, tmp_path):
    (folder / "images").rename(tmp_path / "elsewhere")
    (folder / "images").symlink_to(tmp_path / "elsewhere")
    assert left_out(folder, "it is a link", r"\w+\.png") == []


def test_a_link_within_the_folder_is_followed(folder):
    (folder / "images" / "rollout_000004_00.png").symlink_to(folder / "images" / "rollout_000000_00.png")
    assert captions(folder)[1:] == [ROLLOUTS, ROLLOUTS.replace("0", "4")]


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claiming(width, height):
    """The beginning of a PNG that claims to be this large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is no PNG"),
        (b"a private key", "it is no PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "it is no PNG"),
        (b"GIF89a\x01\x00\x01\x00\x00\x00\x00;", "it is no PNG"),
        (claiming(10_000, 10_000), r"Image size \(100000000 pixels\) exceeds limit"),
        (claiming(10**6, 10**6), r"Image size \(1000000000000 pixels\) exceeds limit"),
        (claiming(8, 8)[:-20], ""),
    ],
)
def test_what_is_no_image_is_not_shown(data, message, folder):
    (folder / "images" / "before_after.png").write_bytes(data)
    assert left_out(folder, message) == [ROLLOUTS]


def test_a_large_file_that_is_cut_is_not_shown(folder):
    path = folder / "images" / "before_after.png"
    Image.effect_noise((400, 400), 100).save(path, compress_level=0)
    path.write_bytes(path.read_bytes()[:-1000])
    assert left_out(folder, "") == [ROLLOUTS]


def test_names_that_are_no_file_of_images(folder):
    images = folder / "images"
    (images / "before_after.png").unlink()
    os.mkfifo(images / "before_after.png")
    for name in (
        "rollout_one_00.png",
        "rollout_.png",
        "rollout_000001_00.png.png",
        f"rollout_{'9' * 99}_0.png",
    ):
        Image.new("RGB", (8, 8)).save(images / name)
    os.mkfifo(images / "eval_pipe.png")
    (images / "eval_folder.png").mkdir()
    with pytest.warns(UserWarning, match=r"images/eval_(folder|pipe)\.png ") as caught:
        assert captions(folder) == [ROLLOUTS]
    assert [str(warning.message).partition("images/")[2].split()[0] for warning in caught] == [
        "eval_folder.png",
        "eval_pipe.png",
    ]


def test_of_many_images_some_are_shown(folder):
    (folder / "images" / "before_after.png").unlink()
    for place in range(40):
        Image.new("RGB", (8, 8)).save(folder / "images" / f"eval_{place:03d}.png")
    assert len(captions(folder)) == MAX_GRIDS + 1


@pytest.mark.parametrize("suffix", [".mp4", ".webp"])
def test_the_last_films_of_a_run_are_shown(suffix, folder, monkeypatch):
    if suffix == ".webp":
        monkeypatch.setitem(sys.modules, "av", None)
    else:
        pytest.importorskip("av")
    videos = np.zeros((2, 3, 32, 32, 3), dtype=np.uint8)
    for name in ("eval_before", "eval_after", "rollout_000002", "rollout_000010"):
        shown = Shown(images=videos + len(name), prompts=[Prompt(text="a cat")] * 2, rate=16)
        save_film(shown, folder / "images" / name)
    found = {picture.title: picture for picture in pictures(read_run(folder))}
    assert len(found) == 4
    for title, name in zip(list(found)[-2:], ("eval_after", "rollout_000010"), strict=True):
        data = base64.b64encode((folder / "images" / f"{name}{suffix}").read_bytes()).decode()
        assert found[title].source.endswith(data)
        assert ("<video" in found[title].html()) == (suffix == ".mp4")


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"a private key", "no film"), (b"0" * (MAX_FILM_BYTES + 1), f"{MAX_FILM_BYTES} bytes")],
)
def test_a_file_that_is_no_film_is_left_out(data, reason, folder):
    (folder / "images" / "rollout_000002.mp4").write_bytes(data)
    assert "rollouts, moving" not in left_out(folder, reason, "rollout_000002.mp4")
