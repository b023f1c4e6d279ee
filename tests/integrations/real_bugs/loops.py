"""Other projects' own loops, run as programs of their own on a tree of their source."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from integrations.real_bugs.bugs import Bug

HERE = Path(__file__).resolve().parent
KEYS = (
    *("ff_guidance_never_on", "ff_guard_all_means", "ff_half_latents"),
    *("vo_colliding_seeds", "vo_cut_embeddings", "vo_guidance_dropped", "vo_half_latents"),
)
"""The bugs that run in the project's own loop."""
PINNED = "a1139baf"
"""The commit of verl-omni on which fixes are taken back."""


def tree(clone: str, commit: str, part: str, folder: Path) -> Path:
    """One folder of a commit of a git clone, in a folder of its own."""
    folder.mkdir(parents=True)
    packed = subprocess.run(
        ["git", "-C", clone, "archive", commit, part], capture_output=True, check=False
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    return folder


def run(bug: Bug, after: bool, folder: Path, work: str) -> None:
    """Train two steps or epochs in the project's loop, and dump them into `folder`.

    Raises:
        RuntimeError: the loop ended with an error; the message is its last lines.
    """
    source = Path(f"{folder}-tree")
    if bug.project == "verl-omni":
        tree(os.environ["VERL_OMNI"], PINNED, "verl_omni", source)
        call = [
            os.environ.get("VERL_OMNI_PYTHON", sys.executable),
            str(HERE / "verl_omni.py"),
            str(folder),
            bug.key,
        ]
        _call([*call, *(() if after else ("taken_back",))], {"VERL_OMNI": str(source), "WORK": work})
        return
    tree(os.environ["FLOW_FACTORY"], bug.fix if after else f"{bug.fix}^", "src", source)
    call = [os.environ.get("FLOW_FACTORY_PYTHON", sys.executable), str(HERE / "flow_factory.py")]
    _call([*call, str(source / "src"), str(folder), bug.key], {"EPOCHS": "2", "WORK": work})


def _call(command: list[str], extra: Mapping[str, str]) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"} | extra
    done = subprocess.run(
        command, env=environment, cwd=extra["WORK"], capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
