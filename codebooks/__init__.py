"""Item vectors -> semantic ids: codebooks, the codes of items, what the codes are worth, and the folder with them."""

from evenrank.core import optional_imports

__getattr__, __dir__, __all__ = optional_imports.attach_stub(__name__, __file__)
