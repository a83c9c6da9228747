"""A training job around the models of the other folders: data, balance, checkpoints, evaluation and logs."""

from evenrank.core import optional_imports

# The names of `__init__.pyi` are imported at their first use: showing the help of a command does not wait for torch.
__getattr__, __dir__, __all__ = optional_imports.attach_stub(__name__, __file__)
