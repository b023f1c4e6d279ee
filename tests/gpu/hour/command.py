"""The command: which parts are due, each in a process of its own, and what came of them."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.gpu.hour import bundle
from tests.gpu.hour.parts import PARTS, Hour, SkippedError
from tests.gpu.hour.record import Outcome, Record, Row

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "gpu" / "first_hour.py"
GRACE = 75.0
"""Seconds that the last part may run past the minutes of the command."""
PATIENCE = 2.0
"""A part may take so many times its estimate, where the minutes allow it."""


def main(description: str | None) -> int:
    """Run what is due; 0 if nothing is left to do, 1 if a part failed, 75 to be called again."""
    options = _parser(description).parse_args()
    if options.bundle:
        return bundle.fetch(options.bundle, python_version=options.python_version)
    if options.wheels:
        bundle.install(options.wheels)
    if options.child:
        return _measure(options)
    record = Record(options.out)
    due = [name for name in options.parts or PARTS if options.again or name not in record.outcomes]
    if options.dry:
        _list(record)
        return 0
    begin = time.monotonic()
    for place, name in enumerate(due):
        left = 60 * options.minutes - (time.monotonic() - begin)
        if place and left < 60 * PARTS[name].minutes:
            print(f"{len(due) - place} parts are left: run the same command again", flush=True)
            break
        print(f"== {name}: {PARTS[name].about}", flush=True)
        record.outcomes[name] = _run(
            name, record, options, seconds=min(left + GRACE, max(60.0, PATIENCE * 60 * PARTS[name].minutes))
        )
        record.outcomes = {part: record.outcomes[part] for part in PARTS if part in record.outcomes}
        record.save()
        outcome = record.outcomes[name]
        print(f"== {name}: {outcome.status} in {outcome.seconds:.0f} s {outcome.reason}", flush=True)
    print(f"{options.out / 'first_hour.md'}: {len(record.outcomes)} of {len(PARTS)} parts")
    if any(name not in record.outcomes for name in due):
        return 75
    return int(any(outcome.status == "failed" for outcome in record.outcomes.values()))


def _run(name: str, record: Record, options: argparse.Namespace, *, seconds: float) -> Outcome:
    """Run one part in a process of its own, and collect what it has measured, however it ended."""
    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    lines, log = folder / "lines.jsonl", options.out / f"{name}.log"
    lines.unlink(missing_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])
    if PARTS[name].on_host:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(SCRIPT), "--child", name, "--out", str(options.out)]
    command += ["--tiny"] if options.tiny else []
    command += ["--device", "cpu" if PARTS[name].on_host else options.device]
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            code = None
            os.killpg(process.pid, 9)
            process.wait()
    outcome = Outcome(seconds=time.monotonic() - begin)
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.is_file() else ():
        entry = json.loads(line)
        if "row" in entry:
            outcome.rows.append(Row(**entry["row"]))
        elif "fact" in entry:
            outcome.facts.update([entry["fact"]])
        else:
            outcome.status, outcome.reason = entry["status"], entry["reason"]
    if code is None:
        outcome.reason = f"ended after {seconds:.0f} s; see {log.name}"
    elif outcome.status == "failed" and not outcome.reason:
        outcome.reason = f"the process ended with {code}; see {log.name}"
    return outcome


def _measure(options: argparse.Namespace) -> int:
    """In the process of one part: measure, and say how it ended."""
    import torch

    from flowcorr.devices import named_device

    part, folder = PARTS[options.child], options.out / options.child
    hour = Hour(
        device=named_device("--device", options.device),
        tiny=options.tiny,
        folder=folder,
        facts={name: outcome.facts for name, outcome in Record(options.out).outcomes.items()},
        lines=folder / "lines.jsonl",
    )
    if hour.device.index is not None:
        torch.cuda.set_device(hour.device)
    module = importlib.import_module(f"tests.gpu.hour.{part.module}")
    status, reason = "done", ""
    try:
        module.measure(hour, *([] if part.argument is None else [part.argument]))
    except SkippedError as error:
        status, reason = "skipped", str(error)
    except Exception as error:
        traceback.print_exc()
        status, reason = "failed", f"{type(error).__name__}: {error}"[:500]
    with hour.lines.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"status": status, "reason": reason}) + "\n")
    return 0


def _list(record: Record) -> None:
    for name, part in PARTS.items():
        outcome = record.outcomes.get(name)
        state = "" if outcome is None else f"  {outcome.status} in {outcome.seconds / 60:.1f}"
        print(f"{name:<20} {part.minutes:>4g} min  {part.about}{state}")
    print(f"{'all':<20} {sum(part.minutes for part in PARTS.values()):>4g} min")


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/first_hour"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=8, help="begin no part that would end later")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help="only these")
    parser.add_argument("--again", action="store_true", help="also what has run")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1 or cpu")
    parser.add_argument("--tiny", action="store_true", help="models and batches of a test's size")
    parser.add_argument("--dry", action="store_true", help="list the parts and their estimates")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="fetch wheels for a bare machine")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install these wheels first")
    parser.add_argument("--python-version", default="3.12", help="of that machine, for --bundle")
    parser.add_argument("--child", metavar="PART", help=argparse.SUPPRESS)
    return parser
