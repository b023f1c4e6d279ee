"""The command line: `flowcorr train` and its siblings. The terminal belongs to this package."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from flowcorr.cli.installed import told

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a dependency that is missing or broken is an error of one line."""
    try:
        from flowcorr.cli.app import main as run

        return run(argv)
    except KeyboardInterrupt:  # while modules were imported
        return 128 + signal.SIGINT
    except Exception as error:
        message = told(error)
        if message is None:
            raise
        print(f"flowcorr: error: {message}", file=sys.stderr)
        return 1
