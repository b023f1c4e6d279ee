import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowcorr.errors import ConfigError
from flowcorr.references import MAX_SIDE, Reference

WIDTH, HEIGHT = 60, 40


def picture(mode="RGB"):
    """Red on the left, blue on the right."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    pixels[:, : WIDTH // 2, 0] = pixels[:, WIDTH // 2 :, 2] = 255
    return Image.fromarray(pixels).convert(mode)


def encoded(image, file_format, **options):
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def turned():
    """What a camera held upright writes: the picture on its side, and a remark."""
    remark = Image.Exif()
    remark[0x112] = 6
    return encoded(picture().rotate(90, expand=True), "JPEG", exif=remark)


def with_alpha(mode):
    """Transparent on the left."""
    image = picture(mode)
    image.putalpha(Image.fromarray(np.repeat(np.uint8([[0, 255]]), WIDTH // 2, 1).repeat(HEIGHT, 0)))
    return image


def in_16_bits(left=0x8080):
    pixels = np.full((HEIGHT, WIDTH), 0x8080, dtype=np.uint16)
    pixels[:, : WIDTH // 2] = left
    return Image.fromarray(pixels)


RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)


@pytest.mark.parametrize(
    ("content", "left", "right"),
    [
        pytest.param(encoded(picture(), "PNG"), RED, BLUE, id="png"),
        pytest.param(encoded(picture(), "JPEG", quality=100), RED, BLUE, id="jpeg"),
        pytest.param(encoded(picture(), "GIF"), RED, BLUE, id="gif of one frame"),
        pytest.param(encoded(picture("P"), "PNG"), RED, BLUE, id="palette"),
        pytest.param(encoded(picture("CMYK"), "JPEG", quality=100), RED, BLUE, id="cmyk"),
        pytest.param(turned(), RED, BLUE, id="exif rotation"),
        pytest.param(encoded(with_alpha("RGB"), "PNG"), WHITE, BLUE, id="alpha channel"),
        pytest.param(encoded(with_alpha("L"), "PNG"), WHITE, (29, 29, 29), id="grey with alpha"),
        pytest.param(encoded(in_16_bits(), "PNG"), GREY, GREY, id="16 bits"),
        pytest.param(
            encoded(in_16_bits(left=0x80), "PNG", transparency=0x80),
            WHITE,
            GREY,
            id="16 bits, one transparent",
        ),
        pytest.param(
            encoded(picture(), "MPO", save_all=True, append_images=[picture()], quality=100),
            RED,
            BLUE,
            id="a phone's jpeg with a preview",
        ),
    ],
)
def test_images_are_converted_as_people_see_them(tmp_path, content, left, right):
    (tmp_path / "file").write_bytes(content)
    image = Reference.of(tmp_path / "file").image()
    assert (image.mode, image.size) == ("RGB", (WIDTH, HEIGHT))
    pixels = np.asarray(image).astype(int)
    assert np.abs(pixels[HEIGHT // 2, 10] - left).max() <= 3
    assert np.abs(pixels[HEIGHT // 2, -10] - right).max() <= 3


PNG, JPEG = (encoded(picture(), name) for name in ("PNG", "JPEG"))


def with_empty_page(tiff):
    """A TIFF file of one page with a second one that has no fields."""
    begin = int.from_bytes(tiff[4:8], "little")
    end = begin + 2 + 12 * int.from_bytes(tiff[begin : begin + 2], "little")
    return tiff[:end] + len(tiff).to_bytes(4, "little") + tiff[end + 4 :] + bytes(6)


FRAMES = {"save_all": True, "append_images": [picture().rotate(180)]}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        pytest.param(JPEG[: len(JPEG) // 2], "cannot be decoded", id="half a jpeg"),
        pytest.param(PNG[: len(PNG) // 2], "cannot be decoded", id="half a png"),
        pytest.param(with_empty_page(encoded(picture(), "TIFF")), "cannot be decoded", id="an empty page"),
        pytest.param(PNG[:60] + b"?" + PNG[61:], "cannot be decoded", id="a wrong byte"),
        pytest.param(b"", "is no image", id="empty"),
        pytest.param(b"<svg/>", "is no image", id="a drawing"),
        pytest.param(encoded(picture(), "EPS"), "a program in PostScript", id="a program"),
        pytest.param(encoded(Image.new("RGB", (1, 1)), "PNG"), "has 1 x 1 pixels", id="one pixel"),
        pytest.param(
            encoded(Image.new("1", (20_000, 32)), "PNG"),
            f"has 20000 x 32 pixels; give 16 to {MAX_SIDE}",
            id="too wide",
        ),
        pytest.param(encoded(Image.new("1", (20_000, 20_000)), "PNG"), "is too large", id="a bomb"),
        pytest.param(encoded(Image.new("1", (10_000, 10_000)), "PNG"), "is too large", id="nearly a bomb"),
        pytest.param(encoded(picture(), "GIF", **FRAMES), "has 2 frames", id="animated gif"),
        pytest.param(encoded(picture(), "PNG", **FRAMES), "has 2 frames", id="animated png"),
        pytest.param(encoded(picture(), "TIFF", **FRAMES), "has 2 frames", id="pages"),
        pytest.param(encoded(picture("F"), "TIFF"), "32 bits", id="float"),
        pytest.param(encoded(picture("I"), "TIFF"), "32 bits", id="long integers"),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path, content, cause):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} .*{cause}") as caught:
        Reference.of(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gone.png", ".", "a\0b"])
def test_what_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=f"reference image {tmp_path}"):
        Reference.of(Path(tmp_path / name))


def test_the_content_is_the_reference(tmp_path):
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    for path in (first, second):
        path.write_bytes(PNG)
    reference = Reference.of(first)
    assert reference.digest == Reference.of(second).digest
    first.write_bytes(encoded(picture().rotate(180), "PNG"))
    with pytest.raises(ConfigError, match=f"{first} has changed"):
        reference.image()


def test_an_image_is_scaled_and_cut_to_a_size(tmp_path):
    (tmp_path / "file").write_bytes(PNG)
    fitted = np.asarray(Reference.of(tmp_path / "file").fitted(20, 20))
    assert fitted.shape == (20, 20, 3)
    assert fitted[10, 2].tolist() == list(RED)  # the middle of both halves is left
    assert fitted[10, -3].tolist() == list(BLUE)
