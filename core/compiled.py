"""The decorator of every compiled loop."""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function with Numba at its first call, cached on disk; it runs without the GIL and keeps its type."""
    return cast(Function, njit(nogil=True, cache=True)(function))
