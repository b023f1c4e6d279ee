"""What torch really allocates on a CPU."""

import json

from torch.profiler import ProfilerActivity, profile


def allocated(compute, folder):
    """Bytes that torch's CPU allocator held at the most, above the least that it held meanwhile.

    That least is what stays: what other threads still held at the start, of a collective that had ended, they free.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    memory = [event["args"] for event in events if event.get("name") == "[memory]"]
    held = [
        memory[0]["Total Allocated"] - memory[0]["Bytes"],
        *(event["Total Allocated"] for event in memory),
    ]
    return max(held) - min(held)
