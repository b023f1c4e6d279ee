"""All that flowcorr understands of verl's older rollout correction: keys, three functions, names of metrics.

Names are imported when they are first used: the configuration reads keys, without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
