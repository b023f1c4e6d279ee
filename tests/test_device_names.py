"""Names of devices that a configuration may give."""

import pytest

from flowcorr.device_names import check_device_name
from flowcorr.errors import ConfigError


def test_names_of_devices_that_some_machine_may_have():
    for name in ("auto", "cpu", "cuda", "cuda:7", "mps"):
        check_device_name("trainer.device", name)
    for name in ("cudda", "meta", "cuda:x", "cuda:07", ""):
        with pytest.raises(ConfigError, match=rf"^trainer\.device='{name}' .*\(it is no device\)"):
            check_device_name("trainer.device", name)
