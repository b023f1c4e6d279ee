"""Memory of this process in MB, from `/proc`: `ru_maxrss` would begin with the parent's."""

import re
from pathlib import Path


def resident() -> float:
    """What it holds now."""
    return _field("VmRSS")


def high_water() -> float:
    """The most that it held since its start, or since `reset_high_water`."""
    return _field("VmHWM")


def reset_high_water() -> None:
    """Let `high_water` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _field(name: str) -> float:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match.group(1)) / 1024
