"""The instruments say of stored runs what they always said.

`REWRITE_GOLDENS=1 python -m pytest tests/instruments/test_goldens.py` writes `goldens.json` anew.
"""

import json
import os
import re
from pathlib import Path

import pytest
from instruments.doctor.plain_loop import dump_steps
from instruments.goldens import (
    SMALL,
    audited,
    audited_recipe,
    examined,
    half_bound,
    own_run,
    reported,
    watched,
)
from instruments.simulated_steps import simulated_steps

from flowcorr.rollout import InProcessEngine
from tests.shallow import SHALLOW

HERE = Path(__file__).parent
STORED = HERE / "stored"
RUNS = ("decoupled", "bypass", "int4_stale")  # of the embedded model, seeded, five training steps each
DUMPS = ("clean", "shared_shift", "swapped_images", *RUNS)
CAPTURED = ("", "guidance_off", "swapped_images", "summed")
GOLDENS = HERE / "goldens.json"


@pytest.fixture
def golden():
    """Compare data with those of a name in `goldens.json`."""

    def compare(name, found, rel=1e-4):
        kept = json.loads(GOLDENS.read_text(encoding="utf-8")) if GOLDENS.is_file() else {}
        if "REWRITE_GOLDENS" in os.environ:
            kept[name] = found
            text = json.dumps(kept, indent=1, sort_keys=True) + "\n"
            text = re.sub(r"\[[^][{}]*\]", lambda row: " ".join(row[0].split()), text)  # a row a line
            GOLDENS.write_text(text, encoding="utf-8")
        assert _leaves(found) == {
            place: pytest.approx(value, rel=rel, abs=1e-9) if isinstance(value, float) else value
            for place, value in _leaves(kept[name]).items()
        }

    return compare


def _leaves(value, place=""):
    """The plain values of nested ones, by their place."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, part in pairs for key, leaf in _leaves(part, f"{place}/{name}").items()}
    return {place: value}


@pytest.mark.parametrize("name", DUMPS)
def test_audit_of_a_dump(name, golden, tmp_path, capsys):
    golden(f"audit {name}", audited([STORED / name], tmp_path, capsys), rel=1e-6)


def test_audit_of_the_tiny_recipe(golden, tmp_path, capsys):
    found = audited_recipe(["tiny_jpeg_lora", *SMALL, "--batches", "1"], tmp_path, capsys)
    golden("audit tiny", found, rel=0.05)  # other kernels round other weights


@pytest.mark.parametrize("name", DUMPS)
def test_report_of_a_dump(name, golden, tmp_path):
    golden(f"report {name}", reported(STORED / name, tmp_path))


def test_report_of_a_run(golden, tmp_path):
    golden("report own", reported(own_run(tmp_path / "own"), tmp_path / "report"))


def test_watch(golden):
    golden("watch", watched())


def test_rules_of_simulated_steps(golden):
    golden("simulated steps", simulated_steps(), rel=1e-6)


@pytest.mark.parametrize("fault", ["", "half_bound"])
def test_doctor_on_the_tiny_recipe(fault, golden, capsys, monkeypatch):
    if fault:
        monkeypatch.setattr(InProcessEngine, "sync", half_bound)
    golden(f"doctor tiny {fault}".strip(), examined(["tiny_jpeg_lora", *SMALL], capsys))


@pytest.mark.parametrize("fault", CAPTURED)
def test_doctor_on_captured_samples(fault, golden, tmp_path, capsys):
    folder = dump_steps(tmp_path, *filter(None, [fault]), steps=1)
    golden(f"doctor captured {fault}".strip(), examined([folder, "--model", SHALLOW], capsys))
