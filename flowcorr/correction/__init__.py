"""Rollout correction: importance weights, rejection and diagnostics of the rollout-to-training drift.

Names are imported when they are first used: the configuration reads tables of this package, without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
