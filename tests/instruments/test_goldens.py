"""The instruments say of stored runs what they always said.

`REWRITE_GOLDENS=1 python -m pytest tests/instruments/test_goldens.py` writes `goldens.json` anew.
"""

import json
import os
from pathlib import Path

import pytest
from instruments.doctor.plain_loop import dump_steps
from instruments.goldens import SMALL, audited, compared, examined, half_bound, own_run, reported, watched
from instruments.simulated_steps import simulated_steps

from flowcorr.rollout import InProcessEngine
from tests.shallow import SHALLOW

HERE = Path(__file__).parent
STORED = HERE / "stored"
DUMPS = ("clean", "shared_shift", "swapped_images")
CAPTURED = ("", "guidance_off", "swapped_images", "summed")
GOLDENS = HERE / "goldens.json"


@pytest.fixture
def golden():
    """Compare data with those of a name in `goldens.json`."""

    def compare(name, found, rel=1e-4):
        kept = json.loads(GOLDENS.read_text(encoding="utf-8")) if GOLDENS.is_file() else {}
        if "REWRITE_GOLDENS" in os.environ:
            kept[name] = found
            GOLDENS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
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
    found = audited([STORED / name], tmp_path, capsys)
    del found["presets"]  # of the current policy, see `test_presets_on_a_dump`
    golden(f"audit {name}", found)


def test_audit_of_the_tiny_recipe(golden, tmp_path, capsys):
    found = audited(["tiny_jpeg_lora", *SMALL, "--batches", "1"], tmp_path, capsys)
    golden("audit tiny", found, rel=0.05)  # other kernels round other weights


@pytest.mark.parametrize("name", DUMPS)
def test_presets_on_a_dump(name, golden):
    golden(f"presets {name}", compared(STORED / name))


@pytest.mark.parametrize("name", DUMPS)
def test_report_of_a_dump(name, golden):
    golden(f"report {name}", reported(STORED / name))


def test_report_of_a_run(golden, tmp_path):
    golden("report own", reported(own_run(tmp_path / "own")))


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
