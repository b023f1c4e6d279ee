"""Sizes that a model cannot make."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.models.sizes import check_size


def test_sizes_are_multiples_and_the_error_names_one():
    check_size(64, 96, 16)
    with pytest.raises(ConfigError, match=r"sampling\.width=100 does not fit .*multiple of 16, such as 96$"):
        check_size(64, 100, 16)
    with pytest.raises(
        ConfigError, match=r"^trainer\.eval_height=80 is larger than .* allow; use at most 64$"
    ):
        check_size(80, None, 16, largest=64, section="trainer.eval_")
