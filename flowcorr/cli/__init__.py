"""The command line: `flowcorr train` and its siblings. The terminal belongs to this package."""

from flowcorr.cli.app import main

__all__ = ["main"]
