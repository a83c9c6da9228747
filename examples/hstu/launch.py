"""`Kernel`: a Triton kernel that keeps its compiled forms, because Triton takes long to find the one to launch.

In each launch it binds arguments to names, and looks at its own settings, at what else could change, and at all
arguments: on some hosts this takes 40 us, longer than a GPU needs for a small kernel. Here, only arguments can change.
"""

from typing import Any

from torch import Tensor

Argument = Tensor | float | None
_INT32_END = 1 << 31


class Kernel:
    """A kernel, and its compiled forms.

    Args:
        function: by `triton.jit`, whose constants come after its arguments.

    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def launch(self, grid: tuple[int, int, int], *arguments: Argument, **constants: Any) -> None:
        """Launch programs on the current stream of the arguments' device, which must be the current device.

        Args:
            grid: how many programs along each axis.
            arguments: the first one is a tensor. Given by position, unlike the rest.
            constants: those of the kernel, and options such as `num_warps`.

        """
        first = arguments[0]
        assert isinstance(first, Tensor)
        key = (first.device, *map(_kind, arguments), *constants.items())
        found = self._compiled.get(key)
        if found is not None:
            compiled, values = found
            compiled[grid](*arguments, *values)
            return
        compiled = self._function[grid](*arguments, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            names = self._function.arg_names[len(arguments) :]
            self._compiled[key] = compiled, tuple(constants[name] for name in names)


def _kind(argument: Argument) -> Any:
    """Return what Triton compiles a kernel for: the dtype of a tensor, and what makes its address or a number special.

    Source: `specialize_impl` of triton.runtime.jit: 1 is a constant, multiples of 16 are marked, larger types wider.
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return 1 if argument == 1 else (argument % 16 == 0, -_INT32_END <= argument < _INT32_END)
    return type(argument)
