"""An installation that was interrupted is told in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flowcorr
from flowcorr.cli.installed import told

ROOT = Path(flowcorr.__file__).parents[1]
BROKEN = "import ctypes\nctypes.CDLL('libnowhere.so')\n"


def run(folder, *arguments):
    """A command whose Python finds the modules of `folder` before all others."""
    return subprocess.run(
        [sys.executable, "-m", "flowcorr", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("package", ["lazy_loader", "rich", "omegaconf", "yaml", "numpy"])
def test_a_missing_dependency_is_one_line_with_the_command(tmp_path, package):
    missing = f"raise ModuleNotFoundError('No module named {package}', name={package!r})\n"
    (tmp_path / f"{package}.py").write_text(missing)
    done = run(tmp_path, "config", "tiny_ocr_lora")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"flowcorr needs {package}, which is not installed" in done.stderr
    assert "pip install -e" in done.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "distribution"),
    [
        ("lazy_loader", ["config", "tiny_ocr_lora"], "lazy-loader"),
        ("yaml", ["config", "tiny_ocr_lora"], "pyyaml"),
        ("torch", ["train", "tiny_ocr_lora"], "torch"),
    ],
)
def test_a_broken_dependency_is_one_line_with_the_command(tmp_path, package, arguments, distribution):
    (tmp_path / f"{package}.py").write_text(BROKEN)
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"flowcorr needs {package}, which is installed but cannot be imported (OSError" in done.stderr
    assert f"pip install --force-reinstall --no-deps {distribution}" in done.stderr.lower()


def test_other_errors_are_not_blamed_on_the_installation():
    fault = KeyError("a fault of ours")
    fault.__context__ = ModuleNotFoundError("an optional package", name="nowhere")  # was being handled
    assert told(fault) is None
    assert told(ModuleNotFoundError("no such part", name="flowcorr.nowhere")) is None
