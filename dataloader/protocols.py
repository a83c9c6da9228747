"""The optional methods of iterables of batches: resuming, and checking that all ranks read the same data.

A Balancer accepts any iterable of batches (see adapt.py). It passes `state_dict` and `load_state_dict` on to a
`Stateful` one, and compares the identities of `HasIdentity` ones between ranks.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from evenrank.dataloader.batch import JaggedBatch


@runtime_checkable
class Stateful(Protocol):
    """Batches whose position can be saved and loaded.

    Loading the state after a batch makes the next iteration yield exactly the samples of the epoch that come after it,
    or the next epoch if none are left.
    """

    def state_dict(self, *, after: JaggedBatch | None = None) -> dict[str, Any]:
        """Return the position as values that can be pickled and saved with a checkpoint.

        Args:
            after: a batch that was yielded, of which only `epoch` and `position` are used; None: the one yielded last.
                Consumers that pull batches ahead of training pass the batch that was trained last.

        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, from the next iteration on, at the position that `state_dict` returned.

        Raises:
            StateError: the state is of another version, or of other data or settings.

        """
        ...


@runtime_checkable
class HasIdentity(Protocol):
    """Batches that describe the settings they depend on."""

    def identity(self) -> Mapping[str, Any]:
        """Return the settings that must be the same on all ranks, by name, as values that can be pickled and compared.

        `rank`, if it is among them, is the exception: it must be the number of the rank itself.
        """
        ...
