"""Training runs. Names are imported when they are first used: the instruments read single modules of this package."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
