"""Run others' bugs before and after their fix, and write what flowcorr says of each.

    WORK=FOLDER MILES_DIFFUSION=CLONE ... PYTHONPATH=.:tests:examples/tiny_ocr \
        python -m integrations.real_bugs FOLDER [KEY ...]

WORK holds `model` and `prompts`, as `test_real_loops.py` makes them; FOLDER gets the dumps and `results.jsonl`. The
environment names a git clone of each project: FLOW_FACTORY, VERL_OMNI, MILES_DIFFUSION, DANCE_GRPO, UNIRL; and folders
with the packages of verl (VERL) and SGLang (SGLANG), and with the wheels of vllm-omni (VLLM_OMNI). FLOW_FACTORY_PYTHON
and VERL_OMNI_PYTHON are the Pythons of their loops. Without keys, all that are not held run.
"""

import json
import os
import sys
from pathlib import Path

from integrations.real_bugs import functions, loops, our_loop, second, verdicts
from integrations.real_bugs.bugs import held, read_bugs

_JUDGED = {}  # equal dumps, such as those of several fixes, are judged once


def judge(bug, after, folder):
    """A record of one run."""
    model = Path(os.environ["WORK"]) / "model"
    if bug.run in ("loop", "reversed"):
        loops.run(bug, after, folder, os.environ["WORK"])
    else:
        second_list = bug.key in second.PARTS
        parts = second.PARTS[bug.key](after) if second_list else functions.parts_of(bug.key, bug.fix, after)
        model = our_loop.changed(model, parts.scheduler, folder.with_name(f"{folder.name}_model"))
        our_loop.run(model, folder, parts)
    digest = verdicts.digest_of(folder)
    if digest not in _JUDGED:
        _JUDGED[digest] = verdicts.findings_of(folder, str(model))
    found = _JUDGED[digest]
    said = {name: verdicts.said_of(findings, bug.name) for name, findings in found.items()}
    return {
        "key": bug.key,
        "after": after,
        "outcome": verdicts.outcome(bug.name, said),
        "said": {name: [*each.names, *each.unnamed] for name, each in said.items()},
    }


def main(folder, *keys):
    """Run bugs, and write a line for each run."""
    folder, bugs = Path(folder), read_bugs()
    folder.mkdir(exist_ok=True, parents=True)
    runnable = [*functions.PARTS, *second.PARTS, *loops.KEYS]
    for key in keys or [key for key in runnable if key not in held(bugs)]:
        for after in (False, True):
            try:
                record = judge(bugs[key], after, folder / f"{key}_{'after' if after else 'before'}")
            except Exception as error:
                record = {
                    "key": key,
                    "after": after,
                    "error": f"{type(error).__name__}: {str(error)[-2000:]}",
                }
            print(json.dumps(record), flush=True)
            with (folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
