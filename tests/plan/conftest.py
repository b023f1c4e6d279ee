from collections.abc import Callable

import pytest

from flowcorr.plan.devices import GPUS
from flowcorr.plan.fake_device import FakeDevice


@pytest.fixture
def new_device() -> Callable[[], FakeDevice]:
    return lambda: FakeDevice(GPUS["h100-80gb"])
