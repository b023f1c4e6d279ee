"""`flowcorr`, killed at a chosen moment while it writes the checkpoint of a step: MOMENT STEP ARGUMENTS..."""

import os
import signal
import sys
from pathlib import Path

from flowcorr.cli import main
from flowcorr.trainer import checkpoint


def die_at(name, is_time):
    """Replace a function of the checkpoint module by one that kills this process when its time has come."""
    original = getattr(checkpoint, name)

    def wrapped(*arguments, **options):
        if is_time(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(checkpoint, name, wrapped)


def train_and_die(moment, step, *arguments):
    folder = f"step_{int(step):06d}"
    # The moments lie between calls of the module's own functions, two of them private: no option of a run names them.
    moments = {
        "before its tensors": ("save_file", lambda tensors, path: folder in str(path)),
        "before its manifest": ("_digest", lambda path: f".partial_{folder}" in str(path)),
        "before it is renamed": ("_sync", lambda path: path.name == f".partial_{folder}"),
        "before old ones go": ("prune", lambda root: (Path(root) / folder).exists()),
    }
    die_at(*moments[moment])
    sys.exit(main(arguments))


if __name__ == "__main__":
    train_and_die(*sys.argv[1:])
