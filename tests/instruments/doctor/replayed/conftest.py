"""The plain loop's samples on the training stack."""

import pytest
from instruments.doctor.replayed.plain_loop import Loop

from flowcorr import ReplaySamples
from flowcorr.config import ModelConfig
from flowcorr.instruments.doctor.replayed.stack import Stack
from flowcorr.models import load_family
from tests.shallow import SHALLOW


@pytest.fixture(scope="session")
def captured():
    """What a clean step captured, of a window with Euler steps before, in and after it."""
    return Loop(window="middle").sample()


@pytest.fixture
def stack_of(captured):
    """A function from changed fields to a stack with the samples."""

    def make(**changes):
        fields = {name: value for name, value in (captured | changes).items() if value is not None}
        return Stack(load_family(ModelConfig(path=SHALLOW)), ReplaySamples(**fields))

    return make
