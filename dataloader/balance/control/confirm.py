"""The confirmation of a step: ranks compare what each of them has planned, before any sample moves.

A rank that planned differently, whatever the cause, would send other bytes than its peers expect: samples would be
lost, or Gloo would abort the process. A rank that failed to plan would leave its peers waiting for bytes.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from evenrank.core.errors import RankError, one_line
from evenrank.dataloader.balance.control.all_gather import MetadataAllGather, all_gather_objects
from evenrank.dataloader.balance.control.consistency import raise_reported_errors
from evenrank.dataloader.balance.control.wire import STATUS_FAILED, STATUS_OK


def confirm(
    all_gather: MetadataAllGather,
    *,
    metadata: NDArray[np.uint8],
    rank_of: NDArray[np.int32] | None,
    error: Exception | None,
    step_name: str,
    strategy: str,
) -> None:
    """Return if all ranks have planned a step alike. Collective: every rank must call this.

    Args:
        all_gather: of all ranks.
        metadata: the messages that this rank received from all ranks, uint8 [W, message size].
        rank_of: this rank's assignment, int32 [W, B]; None if it failed.
        error: why it failed; None if it has not.
        step_name: the step, for messages.
        strategy: the strategy's name, for messages.

    Raises:
        RankError: another rank failed, or two ranks differ; the message names them.
        Exception: this rank's own error.

    """
    words = np.array(
        [
            STATUS_OK if error is None else STATUS_FAILED,
            _digest(metadata),
            0 if rank_of is None else _digest(rank_of),
        ]
    )
    statuses, received, assigned = all_gather.all_gather(words.view(np.uint8)).copy().view(np.int64).T
    if (statuses != STATUS_OK).any():
        errors = all_gather_objects(all_gather, None if error is None else one_line(error))
        if error is not None:
            raise error
        raise_reported_errors(errors)
    if (rank := _first_that_differs(received)) is not None:
        raise RankError(
            f"in {step_name}, rank {rank} received other metadata than rank 0; the memory or the network of a host is "
            "faulty"
        )
    if (rank := _first_that_differs(assigned)) is not None:
        raise RankError(
            f"in {step_name}, rank {rank} assigns samples differently from rank 0, given the same costs; the strategy "
            f"{strategy!r} must be a pure function of its argument, and the same code on all ranks"
        )


def _first_that_differs(digests: NDArray[np.int64]) -> int | None:
    differing = np.flatnonzero(digests != digests[0])
    return int(differing[0]) if len(differing) else None


def _digest(array: NDArray[np.generic]) -> int:
    """Return 63 bits of a hash of an array's bytes."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=8).digest(), "little") >> 1
