"""The real verl-omni, where the environment variable VERL_OMNI names its source tree."""

import os

import pytest

if "VERL_OMNI" in os.environ:
    import verl_omni_on_cpu  # noqa: F401  # before any test looks for verl or verl_omni


@pytest.fixture(scope="session")
def omni():
    """`verl_omni_on_cpu`, in a process group of one rank."""
    if "VERL_OMNI" not in os.environ:
        pytest.fail("tests marked verl_omni need the path of a verl-omni source tree in VERL_OMNI")
    import torch
    import verl_omni_on_cpu

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield verl_omni_on_cpu
    torch.distributed.destroy_process_group()
