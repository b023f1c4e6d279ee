"""The Ray cluster: one that is there is used, and one that cannot be used says why."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from flowcorr.errors import BackendError
from flowcorr.workers.cluster import Cluster, init_ray

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]


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


def test_a_machine_without_a_node_of_the_cluster_is_named(ray_cluster):
    """Ray looks for processes of a node, so a process that sees no others is on another machine."""
    elsewhere = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs to be root, and to be allowed to make namespaces")
    address = ray_cluster.get_runtime_context().gcs_address
    code = (
        f"from flowcorr.workers.cluster import Cluster; Cluster({address!r}, feature='rollout.placement=ray')"
    )
    done = subprocess.run(
        [*elsewhere, sys.executable, "-c", code],
        env={**os.environ, "RAY_gcs_server_request_timeout_seconds": "3"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    expected = (
        f"on {socket.gethostname()}, as on each machine that runs a rank, a node of the cluster has to run"
    )
    assert expected in done.stderr


def test_the_cluster_that_is_there_is_used_and_left_alone(ray_cluster):
    cluster = Cluster("10.0.0.1:6379", feature="rollout.placement=ray")
    assert not cluster.local
    cluster.close()
    assert ray_cluster.is_initialized()


@pytest.mark.parametrize("failures", [2, 3])
def test_a_node_that_starts_late_is_started_again(failures, monkeypatch):
    """Ray's own limit of 30 s cannot be reached at will, so its function is replaced."""
    calls = []

    def init(**options):
        calls.append(options)
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    outcome = contextlib.nullcontext() if failures == 2 else pytest.raises(BackendError, match="3 attempts")
    with outcome:
        init_ray(num_cpus=2)
    assert calls == [{"num_cpus": 2}] * 3
