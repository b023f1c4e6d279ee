"""Wheels for a machine without a network, whose image has torch, transformers and peft but little else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

PACKAGES = (
    *("diffusers", "importlib_metadata", "zipp", "omegaconf", "accelerate", "peft"),
    *("httpx2", "httpcore2", "truststore", "idna", "anyio", "rich", "jinja2"),
    # OCR; it also needs onnxruntime and OpenCV
    *("rapidocr==3.10.*", "rapidfuzz", "pyclipper", "shapely", "colorlog", "six", "tqdm"),
    *("pytest", "hypothesis", "sortedcontainers"),
    "bitsandbytes",
)
MAX_BYTES = 64 * 2**20
CUDA = 13
"""The release of CUDA that bitsandbytes is bundled for; its libraries for all others take most of 64 MiB."""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)


def fetch(folder: Path, *, python_version: str) -> int:
    """Download the wheels of `PACKAGES` into `folder`, without what they need in turn."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python_version, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    code = subprocess.run([*command, *PACKAGES], check=False).returncode
    for wheel in folder.glob("bitsandbytes-*.whl"):
        _keep_libraries(wheel, f"cuda{CUDA}")
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(
        f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.1f} of {MAX_BYTES / 2**20:.0f} MiB"
    )
    return code or int(size > MAX_BYTES)


def _keep_libraries(wheel: Path, backend: str) -> None:
    """Take the compiled libraries of other backends out of a wheel of bitsandbytes."""
    thin = wheel.with_suffix(".thin")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(thin, "w", zipfile.ZIP_DEFLATED) as kept:
        for entry in whole.infolist():
            library = Path(entry.filename)
            if library.suffix != ".so" or library.stem.startswith(f"libbitsandbytes_{backend}"):
                kept.writestr(entry, whole.read(entry))
    thin.replace(wheel)


def install(folder: Path) -> None:
    """Install those wheels of `folder` whose packages are missing here, in a new folder that is imported from."""
    missing = [str(wheel) for wheel in sorted(folder.glob("*.whl")) if not _installed(wheel)]
    if not missing:
        return
    target = tempfile.mkdtemp(prefix="flowcorr-wheels-")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", target, *missing], check=True)
    sys.path.insert(1, target)


def _installed(wheel: Path) -> bool:
    try:
        metadata.version(wheel.name.split("-")[0])
    except metadata.PackageNotFoundError:
        return False
    return True
