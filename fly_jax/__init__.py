"""FLy, training-free loosely speculative decoding, for Llama models and their kin in JAX.

What `__init__.pyi` lists is the public API; nothing else is promised. Names are imported on first
use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
