"""The records that travel through one training step.

Names are imported when they are first used: prompts are read and checked without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
