"""Policy losses: pure functions from the tensors of a few steps to a sum with its counts.

Names are imported when they are first used: the configuration reads the table of losses, without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
