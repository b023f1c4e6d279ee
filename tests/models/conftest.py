import diffusers
import pytest
import torch
from tiny_pipelines import PIPELINES

from tests.models.adapters import load


@pytest.fixture
def group_offloading() -> None:
    """Skip where diffusers cannot offload text encoders without an accelerator."""
    if diffusers.__version__.startswith("0.40.") and not torch.accelerator.is_available():
        pytest.skip("diffusers 0.40 offloads only where there is an accelerator")


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """Folders of tiny pipelines, each built when it is first asked for."""
    built = {}

    def folder(name):
        if name not in built:
            built[name] = str(PIPELINES[name].build(tmp_path_factory.mktemp(name)))
        return built[name]

    return folder


@pytest.fixture
def adapter_of(tiny_folders):
    """A function from a tiny pipeline's name, and methods that replace its family's, to that family."""
    return lambda name, **methods: load(tiny_folders(name), name, **methods)
