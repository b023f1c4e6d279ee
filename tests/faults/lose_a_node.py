"""A run on a cluster of two nodes, of which one is lost while it samples: OUT OVERRIDES..."""

import sys
from pathlib import Path

from ray.cluster_utils import Cluster

from flowcorr import config, trainer
from flowcorr.trainer import Silent


class LoseNode(Silent):
    """Takes the second node away when the first step is done, and the next one is sampled."""

    def __init__(self, cluster, node):
        self.cluster, self.node = cluster, node

    def on_step(self, step, metrics):
        if step == 1:
            self.cluster.remove_node(self.node, allow_graceful=False)


if __name__ == "__main__":
    out, *overrides = sys.argv[1:]
    options = {"num_cpus": 2, "object_store_memory": 100_000_000}
    cluster = Cluster(True, head_node_args={"include_dashboard": False, **options})
    try:
        node = cluster.add_node(**options)
        where = (
            f"rollout.ray_address={cluster.address}",
            "rollout.scheduling=spread",
            "rollout.worker_resources={num_cpus: 1}",
        )
        settings = config.load("tiny_jpeg_lora", [*overrides, *where])
        trainer.train(settings, Path(out), observer=LoseNode(cluster, node))
    finally:
        cluster.shutdown()
