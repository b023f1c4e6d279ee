"""The embedded model: a tiny Stable Diffusion 3 that writes words, and often strikes them through.

`MODEL_DIR` is the shipped pipeline folder; `flowcorr.tiny.pretrain.pretrain` rebuilds it from nothing.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parents[1] / "models" / "tiny_ocr"

__all__ = ["MODEL_DIR"]
