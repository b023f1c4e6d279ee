"""Model families: one small adapter each.

Names are imported when they are first used: paths and sizes are checked without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
