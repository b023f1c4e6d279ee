"""Rollout engines, which sample the trajectories.

Names are imported when they are first used: health rules read the table of roundings, without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
