"""Several processes that train together: collectives over the ranks, and how ranks join and leave.

Names are imported when they are first used: tools that read a run's files need no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
