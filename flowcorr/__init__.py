"""flowcorr: FlowGRPO training for flow-matching models, with rollout correction measured before it is trusted.

Importing this package is cheap: the names of its stub, `__init__.pyi`, are imported when they are first used.
"""

from typing import Any

__version__ = "0.1.0"

try:
    import lazy_loader

    __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
except Exception as _error:  # of an interrupted installation, which the command line tells in one line
    _missing = _error

    def __getattr__(name: str) -> Any:
        raise _missing
