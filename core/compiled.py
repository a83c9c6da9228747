"""The decorator of every compiled loop."""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function at its first call, to run without the interpreter's lock; its type stays known."""
    return cast(Function, njit(nogil=True, cache=True)(function))
