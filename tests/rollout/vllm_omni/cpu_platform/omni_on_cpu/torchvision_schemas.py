"""torchvision's Python code beside a CPU build of torch.

PyPI's torchvision links CUDA libraries, so beside a CPU build of torch its operations are not registered, and
its import asks for the schemas of two of them. They are declared right before that import.
"""

import sys


class DeclareSchemas:
    """A finder that finds nothing, and is told of the import before those that do."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(DeclareSchemas)
            _declare()


def _declare() -> None:
    import torch

    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        DeclareSchemas.library = library  # the schemas live as long as it does


sys.meta_path.insert(0, DeclareSchemas)
