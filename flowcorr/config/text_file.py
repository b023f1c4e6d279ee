"""Text files that a user names: recipes, and the files of other trainers."""

from __future__ import annotations

from pathlib import Path

from flowcorr.errors import ConfigError

_MAX_BYTES = 1_000_000


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read, is not UTF-8 text, or is far larger than any recipe or script.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigError(f"the file is too large: {size} bytes, and at most {_MAX_BYTES} are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file is not UTF-8 text: {error.reason} at byte {error.start}") from None
