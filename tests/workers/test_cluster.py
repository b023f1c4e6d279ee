"""The Ray cluster: one that is there is used, and one that cannot be used says why."""

import os
import subprocess
import sys

import pytest

from flowcorr.workers.cluster import Cluster

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        # Ray keeps a token there.
        (
            "HOME",
            f"{__file__}/nowhere",
            "BackendError: the Ray cluster at 'local' cannot be used: NotADirectoryError",
        ),
        (
            "RAY_ADDRESS",
            "ray://10.0.0.1:10001",
            "ConfigError: the address 'ray://10.0.0.1:10001' is one of Ray's client",
        ),
    ],
)
def test_a_cluster_that_cannot_be_used_says_why(variable, value, error):
    """In a process of its own, as this one has a cluster."""
    code = "from flowcorr.workers.cluster import Cluster; Cluster(None, feature='rollout.placement=ray')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_ADDRESS": "local", variable: value},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert error in done.stderr


def test_the_cluster_that_is_there_is_used_and_left_alone(ray_cluster):
    cluster = Cluster("10.0.0.1:6379", feature="rollout.placement=ray")
    assert not cluster.local
    cluster.close()
    assert ray_cluster.is_initialized()
