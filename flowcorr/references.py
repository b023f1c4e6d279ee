"""Reference images: the pictures that a prompt for an editing model speaks of."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowcorr.errors import ConfigError, shortened

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE, MAX_SIDE = 16, 8192  # pixels
_SIZES = f"give {MIN_SIDE} to {MAX_SIDE} pixels a side"
_FORMATS = "give a whole PNG, JPEG or WebP file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One reference image, as a file with a content that must not change.

    Attributes:
        path: the file.
        digest: SHA-256 of its content, in hex.
        size: width and height of the upright picture.
    """

    path: str
    digest: str
    size: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> Reference:
        """The reference at `path`, once it was decoded without an error.

        Raises:
            ConfigError: there is no such file, or it is no still image of a usable size.
        """
        content = _content(path)
        size = _decode(content, path).size
        return cls(path=str(path), digest=hashlib.sha256(content).hexdigest(), size=size)

    def image(self) -> Image:
        """The picture in RGB, upright, with white for transparent pixels.

        Raises:
            ConfigError: the file is gone, or its content is another one.
        """
        path = Path(self.path)
        content = _content(path)
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise ConfigError(
                f"the reference image {self.path} has changed since the prompts were read; leave such files alone "
                "during a run, and start a new run for new ones"
            )
        return _decode(content, path)

    def fitted(self, height: int, width: int) -> Image:
        """The picture at `height` x `width`: scaled to cover that size, and cut at the edges that are too long."""
        from PIL import Image, ImageOps

        return ImageOps.fit(self.image(), (width, height), Image.Resampling.LANCZOS)

    def share_cut(self, height: int, width: int) -> float:
        """Fraction of the picture's area that `fitted` cuts off."""
        ratio = self.size[0] * height / (self.size[1] * width)
        return 1 - min(ratio, 1 / ratio)


def _content(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for its writer
            raise ConfigError(
                f"the reference image {path} is a folder, a pipe or a device; give an image file"
            )
        return path.read_bytes()
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(
            f"the reference image {path} does not exist; a relative path starts at the folder of the prompts' file"
        ) from error
    except (OSError, ValueError) as error:  # a name with a zero character, too
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the reference image {shortened(str(path))} cannot be read: {reason}") from error


def _decode(content: bytes, path: Path) -> Image:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            _check(image, path)
            image.load()
            return _in_rgb(ImageOps.exif_transpose(image))
    except ConfigError:
        raise
    except UnidentifiedImageError as error:
        raise ConfigError(f"the reference image {path} is no image that can be read; {_FORMATS}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ConfigError(f"the reference image {path} is too large ({error}); {_SIZES}") from error
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, struct.error, zlib.error) as error:
        raise ConfigError(
            f"the reference image {path} cannot be decoded ({' '.join(str(error).split())}); {_FORMATS}"
        ) from error


def _check(image: Image, path: Path) -> None:
    """Raise `ConfigError` if the header shows that an image cannot be used, before its pixels are decoded."""
    if image.format == "EPS":  # Pillow would hand its program to Ghostscript, and wait for it
        raise ConfigError(f"the reference image {path} is a program in PostScript; {_FORMATS}")
    if not MIN_SIDE <= min(image.size) <= max(image.size) <= MAX_SIDE:
        raise ConfigError(f"the reference image {path} has {image.width} x {image.height} pixels; {_SIZES}")
    # A photo of some phones is an MPO: a JPEG that carries further ones for its preview.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise ConfigError(
            f"the reference image {path} has {getattr(image, 'n_frames', 'several')} frames; give one of them as an "
            "image of its own"
        )
    # 16 bits of grey are "I;16"; in a PNG, older Pillows say "I".
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ConfigError(
            f"the reference image {path} has pixels of 32 bits without a known range; give 8 or 16 bits a channel"
        )


def _in_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip at 255
        image = _in_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _in_8_bits(image: Image) -> Image:
    """Convert grey of 16 bits to 8 bits, with an alpha channel if one of its values is transparent."""
    from PIL import Image

    pixels = np.asarray(image)
    grey = Image.fromarray((pixels / 257).round().astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey.putalpha(Image.fromarray(np.where(pixels == transparent, 0, 255).astype(np.uint8)))
    return grey
