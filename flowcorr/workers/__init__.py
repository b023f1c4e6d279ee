"""Everything that runs on Ray: the worker pool, its cluster, and rollouts and rewards in workers."""
