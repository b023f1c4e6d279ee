"""`python -m flowcorr`, for launchers that start a module."""

import os
import signal
import sys

if __name__ == "__main__":
    # Python put the working directory first, where libraries would find modules of a stranger's folder.
    if sys.path[0] == os.getcwd():
        del sys.path[0]
    try:
        from flowcorr.cli import main
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(main())
