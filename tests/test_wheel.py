"""The wheel holds what a checkout does: recipes, the embedded model, the templates."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flowcorr
from flowcorr.config import recipe_names
from flowcorr.instruments.plan.architecture import SHIPPED

ROOT = Path(flowcorr.__file__).parent.parent


@pytest.mark.slow
def test_wheel_runs_from_anywhere(tmp_path):
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--quiet",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("flowcorr-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert {f"flowcorr/recipes/{name}.yaml" for name in recipe_names()} <= names
    assert "flowcorr/models/tiny_ocr/model_index.json" in names
    assert {
        f"flowcorr/instruments/plan/architectures/{file.name}" for file in SHIPPED.glob("*.json")
    } <= names
    assert {f"flowcorr/instruments/templates/{name}" for name in ("page.html", "style.css")} <= names
    assert "flowcorr/trainer/templates/model_card.md.j2" in names
    command = [sys.executable, "-m", "flowcorr", "config", "tiny_ocr_lora"]
    outcome = subprocess.run(command, cwd=tmp_path / "site", capture_output=True, text=True, check=True)
    assert outcome.stdout.startswith("model:")
