"""Rewards: callables from images and prompts to scores.

Names are imported when they are first used: a recipe's terms are checked without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
