"""The embedded model without the second and third of its four blocks: what most tests need, for two thirds of the time.

The cut is made once on a machine, in the folder of temporary files. Its other parts are links to the embedded model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from flowcorr.models import EMBEDDED

KEPT = (0, 3)  # the last block of a Stable Diffusion 3 has another layout than those before it
WEIGHTS, CONFIG = "diffusion_pytorch_model.safetensors", "config.json"


def _cut(whole: Path, to: Path) -> None:
    (to / "transformer").mkdir()
    for part in whole.iterdir():
        if part.name != "transformer":
            (to / part.name).symlink_to(part)
    tensors = {}
    for name, tensor in load_file(whole / "transformer" / WEIGHTS).items():
        root, block, *rest = name.split(".", 2)
        if root != "transformer_blocks":
            tensors[name] = tensor
        elif int(block) in KEPT:
            tensors[".".join([root, str(KEPT.index(int(block))), *rest])] = tensor
    save_file(tensors, to / "transformer" / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((whole / "transformer" / CONFIG).read_text())
    (to / "transformer" / CONFIG).write_text(json.dumps(config | {"num_layers": len(KEPT)}))


def _folder() -> Path:
    whole = EMBEDDED["tiny_ocr"]
    digest = hashlib.sha256(str(whole).encode() + Path(__file__).read_bytes())
    for name in (WEIGHTS, CONFIG):
        digest.update((whole / "transformer" / name).read_bytes())
    folder = Path(tempfile.gettempdir()) / f"flowcorr-shallow-{os.getuid()}-{digest.hexdigest()[:16]}"
    if not (
        folder / "transformer" / WEIGHTS
    ).exists():  # a cleaner of temporary files may leave empty folders
        shutil.rmtree(folder, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        _cut(whole, new)
        try:
            new.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return folder


SHALLOW = str(_folder())  # for `model.path`
