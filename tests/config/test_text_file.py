"""Files that a user names."""

import pytest

from flowcorr.config.text_file import read_text
from flowcorr.errors import ConfigError


def test_text_is_read_as_it_is(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: \u00fc}\n", encoding="utf-8")
    assert read_text(path) == "model: {path: \u00fc}\n"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (b"\xff\xfe\x00", "UTF-8 .* byte 0$"),
        (b" " * 1_000_001, "1000001 bytes, .* 1000000 "),
    ],
    ids=["missing", "no text", "large"],
)
def test_what_is_no_text_of_a_recipe_is_refused(tmp_path, content, named):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^the file .*{named}"):
        read_text(path)
