"""What torch really allocates on a CPU."""

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocated(compute):
    """Bytes that torch's CPU allocator held at the most, above the least that it held meanwhile.

    That least is what stays: what other threads still held at the start, of a collective that had ended, they free.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = list(accumulate((event.nbytes() for event in events), initial=0))
    return max(held) - min(held)
