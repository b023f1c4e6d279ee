"""Sizes that a model cannot make."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.models.sizes import check_frame_count, check_size


def test_sizes_are_multiples_and_the_error_names_one():
    check_size(64, 96, 16)
    with pytest.raises(ConfigError, match=r"sampling\.width=100 does not fit .*multiple of 16, such as 96$"):
        check_size(64, 100, 16)
    with pytest.raises(
        ConfigError, match=r"^trainer\.eval_height=80 is larger than .* allow; use at most 64$"
    ):
        check_size(80, None, 16, largest=64, section="trainer.eval_")


def test_frames_are_one_more_than_a_multiple():
    for num_frames in (1, 5, 81):
        check_frame_count(num_frames, 4)
    check_frame_count(2, 1)
    with pytest.raises(
        ConfigError, match=r"sampling\.num_frames=16 .* multiple of 4 and one more, such as 13 or 17"
    ):
        check_frame_count(16, 4)
