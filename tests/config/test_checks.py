"""Keys of Ray's workers."""

import pytest

from flowcorr.config import load_mapping
from flowcorr.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("rollout", {"num_workers": 0}, r"rollout\.num_workers=0 is out of range; it must be at least 1"),
        ("reward", {"num_workers": 0}, r"reward\.num_workers=0 is out of range"),
        ("rollout", {"timeout": 0}, r"rollout\.timeout=0\.0 is out of range; it must be above 0"),
        ("reward", {"timeout": -1}, r"reward\.timeout=-1\.0 is out of range"),
        ("rollout", {"worker_resources": {"num_gpus": "1"}}, r"worker_resources\.num_gpus='1' must be a number"),
        ("rollout", {"worker_resources": {"num_gpus": True}}, r"worker_resources\.num_gpus=True must be a number"),
        ("reward", {"worker_resources": {"rack": -1}}, r"reward\.worker_resources\.rack=-1 is out of range"),
        ("rollout", {"worker_resources": "all"}, r"worker_resources='all' must be a mapping"),
        ("rollout", {"scheduling": "packed"}, r"scheduling='packed' is unknown; choose from default, spread, or the"),
        ("rollout", {"placement": "slurm"}, r"placement='slurm' is unknown; choose from local, ray"),
        ("rollout", {"max_staleness": 1}, r"max_staleness=1 needs workers .*set rollout\.placement=ray"),
        ("rollout", {"placement": "ray", "max_staleness": -1}, r"max_staleness=-1 is out of range"),
        (
            "rollout",
            {"placement": "ray", "max_staleness": 1, "staleness": 2},
            r"rollout\.staleness=2 imitates what rollout\.max_staleness=1 does; set only one of them",
        ),
    ],
)  # fmt: skip
def test_values_that_cannot_be(section, keys, message):
    with pytest.raises(ConfigError, match=message):
        load_mapping({section: keys})


def test_lag():
    def age(**keys):
        return load_mapping({"rollout": keys}).rollout.max_weight_age

    assert age() == 0
    assert age(staleness=3) == 3
    assert age(placement="ray", max_staleness=2) == 2
    assert age(placement="ray", staleness=2) == 2
