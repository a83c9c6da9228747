"""`Kernel`: a Triton kernel that keeps its compiled forms, because Triton takes long to find the one to launch.

In each launch it binds arguments to names, and looks at its own settings, at what else could change, and at all
arguments: on some hosts this takes 40 us, longer than a GPU needs for a small kernel. Here, only arguments can change.
"""

from typing import Any

from torch import Tensor

Argument = Tensor | float | None
# Triton compiles for the dtype of a tensor, for the type of a number, and for what is special about either; source:
# `specialize_impl` of triton.runtime.jit.
_ALIGNMENT = 16  # bytes of an address, and the divisor of a number
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
        key: list[Any] = [first.get_device(), *constants.items()]
        values: list[Any] = []
        for argument in arguments:  # about 20, dozens of times a step: each test counts
            if isinstance(argument, Tensor):
                address = argument.data_ptr()
                values.append(address)  # which Triton takes as it is; of a tensor, it asks the driver what it is
                key.append((argument.dtype,) if address % _ALIGNMENT else argument.dtype)
            else:
                values.append(argument)
                key.append(_kind(argument) if type(argument) is int else type(argument))
        known = tuple(key)
        found = self._compiled.get(known)
        if found is not None:
            compiled, constant_values = found
            compiled[grid](*values, *constant_values)
            return
        compiled = self._function[grid](*arguments, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            names = self._function.arg_names[len(arguments) :]
            self._compiled[known] = compiled, tuple(constants[name] for name in names)


def _kind(number: int) -> int:
    """Return what is special about a number: 1 is a constant in the compiled form, multiples of 16 are known to be."""
    if number == 1:
        return 1
    is_multiple = number % _ALIGNMENT == 0
    return 2 + is_multiple if -_INT32_END <= number < _INT32_END else 4 + is_multiple
