"""flowcorr: FlowGRPO training for flow-matching models, with rollout correction measured before it is trusted.

Importing this package is cheap: the names of its stub, `__init__.pyi`, are imported when they are first used.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
