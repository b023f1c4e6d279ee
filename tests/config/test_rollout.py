"""How a run samples: values that are refused, and what follows from others."""

import pytest

from flowcorr.config import load_mapping
from flowcorr.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"worker_resources": "all"}, r"worker_resources='all' must be a mapping"),
        ({"scheduling": "packed"}, r"scheduling='packed' is unknown; choose from default, spread, or the"),
        ({"placement": "slurm"}, r"placement='slurm' is unknown; choose from local, ray"),
        ({"max_staleness": 1}, r"max_staleness=1 needs workers .*set rollout\.placement=ray"),
        ({"placement": "ray", "max_staleness": -1}, r"max_staleness=-1 is out of range"),
        (
            {"placement": "ray", "max_staleness": 1, "staleness": 2},
            r"rollout\.staleness=2 imitates what rollout\.max_staleness=1 does; set only one of them",
        ),
    ],
)
def test_workers_of_the_rollout(keys, message):
    with pytest.raises(ConfigError, match=message):
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
