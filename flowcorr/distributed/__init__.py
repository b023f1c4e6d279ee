"""Several processes that train together: collectives over the ranks, and how ranks join and leave."""

from flowcorr.distributed.ranks import (
    Group,
    RankError,
    add_up,
    fail_together,
    from_main,
    gather,
    gather_on_main,
    gather_rows,
    is_main,
    local_indices,
    publish,
    published,
    rank,
    ranks_here,
    report_failure,
    world_size,
)
from flowcorr.distributed.start import leave_ranks, local_device, start_ranks

__all__ = [
    "Group",
    "RankError",
    "add_up",
    "fail_together",
    "from_main",
    "gather",
    "gather_on_main",
    "gather_rows",
    "is_main",
    "leave_ranks",
    "local_device",
    "local_indices",
    "publish",
    "published",
    "rank",
    "ranks_here",
    "report_failure",
    "start_ranks",
    "world_size",
]
