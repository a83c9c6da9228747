from typing import Any

import pytest
import torch

from hstu.launch import Kernel
from tests.examples.hstu.samples import needs_triton

Call = tuple[Any, ...]


class Function:
    """Stands in for what `triton.jit` returns, and for the compiled forms of it."""

    arg_names = ("values", "count", "WIDTH", "ROWS")

    def __init__(self, calls: list[Call], event: str = "compiled") -> None:
        self.calls, self.event = calls, event

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.calls.append((self.event, grid, *arguments, *sorted(constants.items())))
            return Function(self.calls, "launched")

        return launch


def test_the_compiled_form_gets_arguments_and_constants_in_the_kernels_order() -> None:
    function, values = Function([]), torch.zeros(4)
    kernel = Kernel(function)
    kernel.launch((2, 1, 1), values, 3, ROWS=8, WIDTH=4, num_warps=2)
    kernel.launch((5, 1, 1), values, 7, ROWS=8, WIDTH=4, num_warps=2)
    kernel.launch((5, 1, 1), values, 7, ROWS=8, WIDTH=8, num_warps=2)
    kernel.launch((5, 1, 1), values, 7, ROWS=8, WIDTH=4, num_warps=8)
    first, second, *others = function.calls
    assert first == ("compiled", (2, 1, 1), values, 3, ("ROWS", 8), ("WIDTH", 4), ("num_warps", 2))
    assert second == ("launched", (5, 1, 1), values.data_ptr(), 7, 4, 8)
    assert [call[0] for call in others] == ["compiled", "compiled"]  # other constants, other options


ALIGNED = torch.zeros(40)


@pytest.mark.parametrize(
    ("other", "is_compiled"),
    [(ALIGNED.bfloat16(), True), (ALIGNED[1:], True), (None, True), (1, True), (ALIGNED[4:], False)],
    ids=str,
)
def test_another_dtype_alignment_or_kind_is_compiled_for(other: Any, is_compiled: bool) -> None:
    function = Function([])
    kernel = Kernel(function)
    for argument in (ALIGNED, other, ALIGNED, other):
        kernel.launch((1, 1, 1), ALIGNED, argument, WIDTH=4, ROWS=8)
    second = "compiled" if is_compiled else "launched"
    assert [call[0] for call in function.calls] == ["compiled", second, "launched", "launched"]


@needs_triton
@pytest.mark.parametrize("argument", [1, 2, 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 0.5])
@pytest.mark.parametrize("other", [1, 5, 32, 2**31, 1.0])
def test_numbers_are_told_apart_as_triton_does(argument: float, other: float) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import create_function_from_signature

    def kernel(values, count):  # type: ignore[no-untyped-def]
        pass

    function = triton.jit(kernel)
    backend = triton.compiler.make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    (_, one, _), (_, two, _) = bind(ALIGNED, argument), bind(ALIGNED, other)
    stand_in = Function([])
    mine = Kernel(stand_in)
    for number in (argument, other):
        mine.launch((1, 1, 1), ALIGNED, number, WIDTH=4, ROWS=8)
    assert (one == two) == (stand_in.calls[1][0] == "launched")
