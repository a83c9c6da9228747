"""Activations that the backward pass computes again instead of keeping them in memory.

    LayerNorm -> linear     `torch.utils.checkpoint`, which keeps the output of the linear alone
    SiLU -> attention       `recompute_saved`: whatever implements attention keeps views of the SiLU's output, and
                            must not run twice, so only what it keeps is replaced

Both run the same operations on the same values again, so gradients stay equal, bit for bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Result = TypeVar("Result")
_LINEAR = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def keep_linear_alone(function: Callable[[Tensor], Result], values: Tensor) -> Result:
    """Return function(values), keeping for the backward pass only its argument and what its linear layers return."""
    contexts = partial(create_selective_checkpoint_contexts, _LINEAR)
    result: Result = checkpoint(function, values, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return result


def recompute_saved(output: Tensor, function: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Within it, what is kept of `output` or of its views for the backward pass is computed again there.

    Args:
        output: what `function` has returned; may itself be a view.
        function: computes it from values that are kept in any case.

    """
    storage = output.untyped_storage().data_ptr()

    @cache  # all views share one tensor, which lives until the backward pass has used the last of them
    def again() -> Tensor:
        with torch.no_grad():
            return function()

    def pack(saved: Tensor) -> "Tensor | _View":
        # Subclasses, such as DTensor, have no storage of their own; all empty tensors have the same one.
        if type(saved) is not Tensor or not saved.numel() or saved.untyped_storage().data_ptr() != storage:
            return saved
        return _View(saved.size(), saved.stride(), saved.storage_offset(), again)

    def unpack(packed: "Tensor | _View") -> Tensor:
        return packed.make() if isinstance(packed, _View) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a tensor that is computed when it is needed."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    compute: Callable[[], Tensor]

    def make(self) -> Tensor:
        return self.compute().as_strided(self.size, self.stride, self.offset)
