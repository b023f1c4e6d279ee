"""Measure on a GPU all that flowcorr promises of one, in an hour: `python tests/gpu/first_hour.py`.

    python tests/gpu/first_hour.py --dry                    # the parts, and how long each takes
    python tests/gpu/first_hour.py --out runs/first_hour    # 8 minutes of it; repeat the command until all is done
    python tests/gpu/first_hour.py --tiny --minutes 60      # everything in tiny sizes, on a CPU where there is no GPU

For a machine without a network and with few packages, where there is one:

    python tests/gpu/first_hour.py --bundle .wheels         # what an image with torch and transformers lacks, 64 MiB
    python tests/gpu/first_hour.py --wheels .wheels         # there: install them in a folder of their own, and go on

Each part is a process of its own: one that fails, runs out of memory or hangs is a row of the table, and the others go
on. `--out` holds `first_hour.jsonl`, from which a repeated command knows what is done, `first_hour.md`, its tables, and
a log of each part. The first, copied, is the data of a page such as `tests/gpu/h200.md`; see `tests/gpu/pages.py`. No
weights and no data are needed: large models get random weights.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.hour.command import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
