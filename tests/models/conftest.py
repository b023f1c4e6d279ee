import diffusers
import pytest
import torch


@pytest.fixture
def group_offloading() -> None:
    """Skip where diffusers cannot offload text encoders without an accelerator."""
    if diffusers.__version__.startswith("0.40.") and not torch.accelerator.is_available():
        pytest.skip("diffusers 0.40 offloads only where there is an accelerator")
