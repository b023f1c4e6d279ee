"""Sizes that a model cannot make."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.models.sizes import check_frame_count, check_size


@pytest.mark.parametrize(
    ("size", "options", "named"),
    [
        ((64, 100), {}, r"sampling\.width=100 .* 16, .* 96$"),
        ((80, None), {"largest": 64, "section": "trainer.eval_"}, r"trainer\.eval_height=80 .* 64$"),
    ],
)
def test_sizes_are_multiples_and_the_error_names_one(size, options, named):
    check_size(64, 96, 16)
    with pytest.raises(ConfigError, match=f"^{named}"):
        check_size(*size, 16, **options)


def test_frames_are_one_more_than_a_multiple():
    for num_frames in (1, 5, 81):
        check_frame_count(num_frames, 4)
    check_frame_count(2, 1)
    with pytest.raises(ConfigError, match=r"^sampling\.num_frames=16 .* 4 .* 13 or 17$"):
        check_frame_count(16, 4)
