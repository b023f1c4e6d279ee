"""The doctor: do the rollout engine and the actor agree, and if not, which part is to blame?

Names are imported when they are first used: `flowcorr explain` reads the table of checks, without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
