"""`python -m flowcorr`, for launchers that start a module."""

import sys

from flowcorr.cli import main

if __name__ == "__main__":
    sys.exit(main())
