"""Values that the section `trainer` refuses."""

import pytest

from flowcorr.config.run import TrainerConfig
from flowcorr.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"requeue": 0}, r"^trainer\.requeue=0 .* 3\.\.125"),
        ({"requeue": 138}, r"^trainer\.requeue=138 "),
        ({"best_metric": "reward"}, r"^trainer\.best_metric='reward' .*eval/reward"),
        (
            {"best_metric": "eval/served/reward"},
            r"best_metric=.*eval_on='trained' .*eval/reward,",
        ),
        ({"seed": 2**63}, r"^trainer\.seed=9223372036854775808 "),
        ({"save_every": 0}, r"^trainer\.save_every=0 .* 1$"),
        ({"eval_height": 10**6}, r"^trainer\.eval_height=1000000 "),
    ],
)
def test_values_out_of_range(keys, named):
    with pytest.raises(ConfigError, match=named):
        TrainerConfig(**keys)
