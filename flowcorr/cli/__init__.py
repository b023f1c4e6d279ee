"""The command line: `flowcorr train`, `eval`, `config`, `presets`, `tiny`. The terminal belongs to this package."""

from flowcorr.cli.app import main

__all__ = ["main"]
