"""How a run samples: values that are refused, and what follows from others."""

import pytest

from flowcorr.config import load_mapping
from flowcorr.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"worker_resources": "all"}, "worker_resources='all' "),
        ({"scheduling": "packed"}, "scheduling='packed' .* default, spread, "),
        ({"placement": "slurm"}, "placement='slurm' .* local, ray$"),
        ({"max_staleness": 1}, r"max_staleness=1 .*rollout\.placement=ray"),
        ({"placement": "ray", "max_staleness": -1}, "max_staleness=-1 "),
        (
            {"placement": "ray", "max_staleness": 1, "staleness": 2},
            r"rollout\.staleness=2 .*rollout\.max_staleness=1 ",
        ),
    ],
)
def test_workers_of_the_rollout(keys, named):
    with pytest.raises(ConfigError, match=named):
        load_mapping({"rollout": keys})


def test_lag():
    def age(**keys):
        return load_mapping({"rollout": keys}).rollout.max_weight_age

    assert age() == 0
    assert age(staleness=3) == 3
    assert age(placement="ray", max_staleness=2) == 2
    assert age(placement="ray", staleness=2) == 2


@pytest.mark.parametrize("learned", [1, 0, -3, 25])
def test_a_step_learns_from_two_or_more_of_what_it_samples(learned):
    with pytest.raises(ConfigError) as refused:
        load_mapping({"rollout": {"n": 24, "n_learned": learned}})
    assert str(refused.value).splitlines() == [
        f"rollout.n_learned={learned} is out of range: of the rollout.n=24 images of a prompt, an update may learn "
        "from 2 to 24; sample more (rollout.n), or use null to learn from all"
    ]
