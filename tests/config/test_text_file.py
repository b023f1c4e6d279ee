"""Files that a user names."""

import pytest

from flowcorr.config.text_file import read_text
from flowcorr.errors import ConfigError


def test_text_is_read_as_it_is(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: \u00fc}\n", encoding="utf-8")
    assert read_text(path) == "model: {path: \u00fc}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "^the file is not UTF-8 text: invalid start byte at byte 0$"),
        (b" " * 1_000_001, "^the file is too large: 1000001 bytes, and at most 1000000 are read$"),
    ],
)
def test_what_is_no_text_of_a_recipe_is_refused(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_text(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="^the file cannot be read: No such file"):
        read_text(tmp_path / "none")
