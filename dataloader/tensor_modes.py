"""Batches do not depend on the modes of torch that a program has set."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make ordinary tensors, as worker threads do, also within `torch.inference_mode()`.

    Inference tensors cannot be saved for a backward pass, such as the ids of an embedding, and loaders read ahead: a
    batch that is made during an evaluation may be trained after it.
    """
    has_grad = torch.is_grad_enabled()  # leaving inference mode would enable it
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
        yield
