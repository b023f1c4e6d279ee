"""Values that the section `trainer` refuses."""

import pytest

from flowcorr.config.run import TrainerConfig
from flowcorr.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"requeue": 0}, r"^trainer\.requeue=0 is out of range; use an exit code in 3\.\.125"),
        ({"requeue": 138}, r"^trainer\.requeue=138 is out of range"),
        ({"best_metric": "reward"}, r"^trainer\.best_metric='reward' .*such as eval/reward"),
        (
            {"best_metric": "eval/served/reward"},
            r"eval_on='trained' does not .* or use eval/reward, which is",
        ),
        ({"seed": 2**63}, r"^trainer\.seed=9223372036854775808 is out of range; it must be at most"),
        ({"save_every": 0}, r"^trainer\.save_every=0 is out of range; it must be at least 1"),
        ({"eval_height": 10**6}, r"^trainer\.eval_height=1000000 is out of range"),
    ],
)
def test_values_out_of_range(keys, message):
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**keys)
