"""Names of devices that a configuration may give."""

from __future__ import annotations

import re

from flowcorr.errors import ConfigError

# Names that every torch knows, so that it need not be imported to tell.
_USUAL = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d?))?")


def check_device_name(key: str, name: str) -> None:
    """Check that some machine may have a device called `name`, `auto` included.

    Raises:
        ConfigError: torch knows no such device, or it holds no numbers.
    """
    if _USUAL.fullmatch(name):
        return

    import torch

    try:
        known = torch.device(name).type != "meta"
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(f"{key}={name!r} cannot be used here (it is no device); use auto, cpu or cuda")
