"""`LoaderAdapter`: any loader's batches as a Balancer pulls them: checked, with a position and a state after each.

loader                                          position of a batch         state after it
state_dict(after=batch), such as our loaders'   the loader's own            the loader's own
DataLoader over an ElasticSampler               its ElasticLoader's         its ElasticLoader's
state_dict(), such as StatefulDataLoader's      counted here                a snapshot, taken when it was pulled
neither, such as DataLoader's                   counted here                an error, once it is asked for

Within a window, or a packed step, of a loader whose rows do not tell their positions, the state is that before the
loaded steps which are partly trained, and which of their rows are left. The next iteration loads these steps again.

A loader that has moved on cannot tell an earlier state, so each batch is pulled with a snapshot, which is kept while
the step is in flight and for `_KEPT_STEPS` more. It is pickled at once, because loaders may change the returned object,
and encoded as text only when that state is asked for.
"""

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Annotated, Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from evenrank.core.errors import ConfigError, DataError, StateError, one_line
from evenrank.core.rules import Bounds
from evenrank.dataloader.balance.config import BalanceConfig
from evenrank.dataloader.balance.steps_in_hand import StepsInHand
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.batches.schema import check_batch, check_batches
from evenrank.dataloader.batches.tensors import outside_inference_mode
from evenrank.dataloader.state.checks import Epoch, Natural, StateFormat, Text, check_saved, decode, encode
from evenrank.dataloader.state.node import (
    EpochNode,
    KnowsPositions,
    batch_size_of,
    exact_length,
    find_rank_invariants,
    in_epochs,
)
from evenrank.dataloader.state.resume_point import CurrentPosition, Left, Position, ResumePoint, Snapshots

# Steps before the one handed out last whose states can be asked for: more than pipelines pull ahead of training.
_KEPT_STEPS = 16

_FORMAT = StateFormat(
    owner="the Balancer",
    version=4,
    fields={
        "epoch": Epoch,
        "position": Annotated[int, Bounds(at_least=0, at_most=1 << 62)],  # to which an epoch's steps are added
        "left": Text,  # see `Left`
        "is_end": bool,
        "world_size": Natural,
        "ranks": Mapping,
    },
    not_covered=frozenset({"ranks"}),  # torch.distributed.checkpoint joins those of all ranks; each has a checksum
)
_FORMAT_OF_RANK = StateFormat(
    owner="a rank",
    version=_FORMAT.version,
    fields={"rank": Natural, "has_ended": bool, "state": Any},
    not_covered=frozenset({"state"}),  # the text that all of this becomes has a checksum
)

Batch = TypeVar("Batch", bound=JaggedBatch)
_Saved = tuple[bool, bytes | str]
"""Whether a rank has no more batches, and the loader's state: pickled, or as it was loaded from a checkpoint."""


class _StatePickler(pickle.Pickler):
    """Pickles byte tensors, the states of generators, as arrays, which takes a fifth of the time."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is Tensor and value.dtype == torch.uint8 and value.device.type == "cpu":
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


class LoaderAdapter(Generic[Batch]):
    """The batches of one rank, epoch after epoch: an iterable of JaggedBatches, or a node of torchdata.

    `ahead` batches are pulled ahead of the one handed out last.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        config: BalanceConfig | None = None,
        *,
        rank: int,
        world_size: int,
        ahead: int = 0,
    ) -> None:
        check_batches(batches)
        self._config = config
        self._batches = in_epochs(batches)
        self.batch_size = batch_size_of(batches)  # rows that a batch can have; 0 if the loader does not tell
        if isinstance(sampler := getattr(batches, "batch_sampler", None), KnowsPositions):
            self._batches = sampler.with_positions(cast(Any, batches))
            self.batch_size = find_rank_invariants(self._batches).get("batch_size", 0)
        self._rank = rank
        self._world_size = world_size
        state_dict = getattr(self._batches, "state_dict", None)
        self._has_state = callable(state_dict) and callable(getattr(self._batches, "load_state_dict", None))
        self._has_positions = self._has_state and "after" in inspect.signature(cast(Any, state_dict)).parameters
        current = getattr(self._batches, "_current", None) if self._has_positions else None
        self.current = current if isinstance(current, CurrentPosition) else CurrentPosition()
        self._is_shared = self.current is current  # with the loader, or counted here
        self._begun: Iterator[Batch] | None = None  # the next iteration, where `start_next` has begun it
        self._has_ended = False  # this rank has no more batches in the next iteration, which is the rest of an epoch
        self._has_loaded = False  # a state, since the latest iteration
        self.is_bypassed = False  # the caller of the Balancer supplies batches itself
        self._end: Position | None = None  # the last one of an epoch over all ranks, once it is known
        self._snapshots: Snapshots[_Saved] = Snapshots(_KEPT_STEPS, ahead)
        self._state_at_start: dict[str, Any] | None = None  # of a loader with a position of its own
        # Of steps that are made of several loaded ones: what is left after each and, if it is kept here, the state.
        self._made: Snapshots[tuple[Left, _Saved | None]] | None = None
        self._rows_follow = self._is_shared and getattr(self._batches, "rows_follow_positions", False)
        self.current.left = None
        if config is not None and config.makes_steps:
            self._made = Snapshots(_KEPT_STEPS)
            if self._is_shared:
                self.current.left = Snapshots(_KEPT_STEPS)
                self.current.left.add(self.current.after_last, None)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch, which moves `current` on once they are handed out."""
        if self._has_positions:
            self.start_next(skip_rest=False)
            if not self._is_shared:  # else the loader itself moves on to the next epoch
                self.current.next = replace(self.current.next, left=None)
            handed_out = self.current.after_last
            for batch in self._batches:
                self.current.after_last = handed_out  # this one is not yet
                check_batch(batch)
                yield self._owned(batch)
                handed_out = self.current.after_last
            return
        iterator, self._begun = self._begun, None
        if iterator is None and not self._has_ended:
            iterator = self._begin()  # some loaders know their state from here on only
        point, self._has_ended = self.current.begin(), False
        if iterator is None:
            return
        epoch, position = point.epoch, point.position
        # A state that was loaded into a StatefulDataLoader by someone else makes it start anywhere.
        is_counted = position > 0 or not getattr(iterator, "_num_yielded", 0)
        expected = exact_length(self._batches) if is_counted else None
        self._take_snapshot(Position(epoch, position))
        for batch in iterator:
            check_batch(batch)
            position += 1
            self._take_snapshot(Position(epoch, position))
            # Another object, because a loader may yield the same batch again.
            yield self._owned(batch).replace(epoch=epoch, step=position - 1, position=position)
        if expected is not None and position < expected:  # a StopIteration of user code is taken for the end
            raise DataError(
                f"the DataLoader ended after {position} of {expected} batches: its dataset or collate_fn raised "
                "StopIteration, as next() does without a default, or its state is damaged; pass a default, raise "
                "another error, or load another state"
            )
        self._take_snapshot(Position(epoch, position), has_ended=True)

    def _begin(self) -> Iterator[Batch]:
        has_loaded, self._has_loaded = self._has_loaded, False
        try:
            return iter(self._batches)
        except Exception as error:  # some loaders look at a loaded state here only
            if has_loaded:
                raise self._refused_state(error) from error
            raise

    def _refused_state(self, error: Exception) -> StateError:
        return StateError(
            f"the {type(self._batches).__name__} cannot load its part of the state ({one_line(error)}); load one that "
            "it has saved"
        )

    def _owned(self, batch: Batch) -> Batch:
        """Return a batch that stays as it is while further ones are pulled: other loaders may reuse their buffers."""
        if isinstance(self._batches, EpochNode):
            return batch
        with outside_inference_mode():
            return batch.clone()

    def length(self) -> int | None:
        """Return the number of batches of an epoch; None if unknown."""
        try:
            return len(cast(Sized, self._batches))
        except (TypeError, NotImplementedError):  # a DataLoader over an IterableDataset has a __len__ that raises
            return None

    def check_counted(self) -> None:
        """Raise a TypeError if steps are packed, whose number nobody knows."""
        if self._config is not None and self._config.pack:
            raise TypeError("packed steps have as many samples as fit, so their number is known once these are loaded")

    def remaining_batches(self) -> int | None:
        """Return the number of batches of the next iteration; None if unknown."""
        self.check_counted()
        if self._has_positions:
            remaining = getattr(self._batches, "remaining_batches", None)
            of_loader = None if remaining is None else int(remaining())
        else:
            of_loader = self.length()
            of_loader = None if of_loader is None else max(of_loader - self.current.next.position, 0)
        left = self.current.next.left
        return of_loader if of_loader is None or left is None else of_loader - left.num_trained

    def begin(self) -> StepsInHand:
        """Return what makes the steps of the next iteration, if these are made of several loaded ones."""
        assert self._config is not None
        assert self._made is not None
        point, after = self.current.next, self.current.after_last
        trained = after.position if after.epoch == point.epoch else 0
        counted = trained if self._config.pack and not self._has_positions else None
        if point.left is None:
            before = Position(point.epoch, point.position if counted is None else counted)
            self._made.add(before, (Left(point.position), None))
        return StepsInHand(
            self._config,
            position=point.position,
            seed=self.current.seed,
            resumed=point.left,
            trained=counted,
            is_each_position=self._rows_follow,
        )

    def hand_out(self, after: Position, left: Left | None) -> None:
        """Move to the position after a step that is handed out, and keep what is left of those that it is made of."""
        self.current.after_last = after
        if left is None or self._made is None:
            return
        begin, saved = Position(after.epoch, left.begin), None
        if self._has_state and not self._has_positions:
            saved = self._snapshots.at(begin)
        self._made.add(after, (left, saved))
        if self.current.left is not None:
            knows_after = left.rows is None or left.has_positions  # else the loader knows that before it alone
            self.current.left.add(after if knows_after else begin, left if left.has_positions else None)

    def rank_invariants(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks; a loader of another world size is a ConfigError."""
        invariants = dict(find_rank_invariants(self._batches))
        created_for = invariants.get("world_size", self._world_size)
        if created_for != self._world_size:
            raise ConfigError(
                f"the loader was created for world_size {created_for}, but {self._world_size} ranks balance together; "
                f"create it with world_size={self._world_size}, the number of ranks of the Balancer's group"
            )
        return invariants

    def start_next(self, *, skip_rest: bool) -> None:
        """Make `state_after` return where the next iteration begins; see `EpochNode`."""
        if not skip_rest and self.current.next.left is not None:
            return
        if self._is_shared:
            self.current.start_next(skip_rest=skip_rest)
        elif self._has_positions:
            self._state_at_start = self._batches.state_dict()
            self.current.move_to(ResumePoint())
        elif self._begun is None and (skip_rest or not self._has_ended):
            self.current.start_next(skip_rest=skip_rest)
            if self._has_state:
                with contextlib.suppress(Exception):  # which the iteration raises, on all ranks
                    if skip_rest and not self._has_ended:
                        next(self._begin(), None)  # or torchdata's Loader keeps the state before what it has read ahead
                    self._begun = self._begin()  # which is when some loaders leave the epoch before
                    self._take_snapshot(self.current.after_last)
            self._has_ended = False

    def end_epoch(self) -> None:
        """Record that no rank has a batch after the one that was handed out last."""
        self._end = self.current.after_last

    def is_left(self) -> bool:
        """Return whether the next iteration begins another epoch than that of the last step, which goes on."""
        last = self.current.after_last
        is_begun = last.epoch < self.current.next.epoch or (self._has_positions and not self._is_shared)
        return last.position > 0 and is_begun and last != self._end and not self.is_bypassed

    def state_after(self, batch: JaggedBatch | None) -> dict[str, Any]:
        """Return the state after a batch that was handed out; None: the last one."""
        self._check_stateful()
        position = self.current.after(batch)
        left, saved = Left(position.position), None
        # A position that nothing was kept at is one that the loader was moved to.
        if self._made is not None and (batch is not None or position in dict(self._made.entries)) and position.position:
            left, saved = self._made.at(position, is_exact=True)
        if self._has_positions and (left.rows is None or left.has_positions):
            if batch is None and (self._is_shared or not position.position):
                return copy.deepcopy(cast(dict[str, Any], self._state_at_start or self._batches.state_dict()))
            return cast(dict[str, Any], self._batches.state_dict(after=position))
        if self.is_bypassed:
            raise ConfigError(
                "steps were started with batches that the Balancer has not pulled itself, so it does not know the "
                "state of the loader; save that yourself, or iterate over the Balancer"
            )
        begin = Position(position.epoch, left.begin)
        if saved is None and self._has_positions:
            saved = False, self._pickled(self._batches.state_dict(after=begin))
        elif saved is None:
            if not self._snapshots.entries:
                self._take_snapshot(begin)
            saved = self._snapshots.at(begin)
        has_ended, text = saved
        # States of ranks are text, so that all ranks' states have the same structure, whatever the loaders save.
        if isinstance(text, bytes):
            text = encode(_FORMAT_OF_RANK.make(rank=self._rank, has_ended=has_ended, state=pickle.loads(text)))
        is_plain = left.rows is None and begin == position
        return _FORMAT.make(
            epoch=position.epoch,
            position=position.position,
            left="" if is_plain else left.to_text(),
            is_end=position == self._end,
            world_size=self._world_size,
            ranks={str(self._rank): text},
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue after the position of a state."""
        self._check_stateful()
        if self._has_positions and not (isinstance(state, Mapping) and "ranks" in state):
            self._state_at_start = None
            if self._made is None or self._config is None or not self._rows_follow:
                self._batches.load_state_dict(state)
            else:
                self._batches.load_window(state, self._config.window)
            self._end = self.current.after_last  # if nothing is left of that epoch
            if not self._is_shared:
                self.current.move_to(ResumePoint(epoch=getattr(self._batches, "epoch", 0)))
            self._keep_loaded(self.current.after_last, Left(self.current.after_last.position), None)
            return
        state = _FORMAT.check(state)
        saved = state["ranks"].get(str(self._rank))
        if state["world_size"] != self._world_size or saved is None:
            saved_ranks = ", ".join(name[:20] for name in state["ranks"] if isinstance(name, str))
            raise StateError(
                f"the state is of {state['world_size']} ranks, with that of ranks {saved_ranks}; "
                f"this is rank {self._rank} of {self._world_size}. Resume a {type(self._batches).__name__} on as many "
                "ranks, each with its own state, or use an ElasticSampler or build_loader, which resume on any number"
            )
        check_saved(f"the state of the Balancer: the part of rank {self._rank}", saved, Text)
        of_rank = _FORMAT_OF_RANK.check(decode(saved))
        if of_rank["rank"] != self._rank:
            found = f"the state of the Balancer has that of rank {of_rank['rank']} under rank {self._rank}"
            raise StateError(f"{found}; load an intact one")
        position, is_end, has_ended = Position(state["epoch"], state["position"]), state["is_end"], of_rank["has_ended"]
        left = Left.from_text(state["left"]) if state["left"] else Left(position.position)
        window = 0 if self._config is None or self._config.pack else self._config.window
        if left.rows is not None and (self._made is None or left.window != window):
            saved_with = f"window={left.window}" if left.window else "pack=True"
            raise StateError(
                f"the state is in the middle of steps that were made of several with {saved_with}; load it with that, "
                "or a state of another step"
            )
        if getattr(self._batches, "_iter_for_state_dict", False):
            # torchdata's Loader has made an iterator for `state_dict`, and would iterate over that, ignoring the state.
            iter(self._batches)
        try:
            self._batches.load_state_dict(of_rank["state"])
        except Exception as error:  # the loader's own
            raise self._refused_state(error) from error
        if not self._has_positions:
            self._has_loaded, self._has_ended, self._begun = True, has_ended and not is_end, None
            self.current.move_to(ResumePoint(epoch=position.epoch, position=left.begin), is_over=is_end)
            self._snapshots.entries.clear()
            self._snapshots.add(Position(position.epoch, left.begin), (has_ended, saved))
        self.current.after_last = position
        self._end = position if is_end else None
        self.current.next = replace(self.current.next, left=None if left.rows is None else left)
        self._keep_loaded(position, left, (has_ended, saved))

    def _keep_loaded(self, position: Position, left: Left, saved: _Saved | None) -> None:
        if self._made is not None:
            self._made.entries.clear()
            self._made.add(position, (left, saved))

    def _check_stateful(self) -> None:
        if not self._has_state:
            raise ConfigError(
                f"the loader, a {type(self._batches).__name__}, has no state_dict and load_state_dict; use torchdata's "
                "StatefulDataLoader, a loader of evenrank, or one that has"
            )

    def _take_snapshot(self, position: Position, *, has_ended: bool = False) -> None:
        if self._has_state:
            self._snapshots.add(position, (has_ended, self._pickled(self._batches.state_dict())))

    def _pickled(self, state: Any) -> bytes:
        pickled = io.BytesIO()
        _StatePickler(pickled, pickle.HIGHEST_PROTOCOL).dump(state)
        return pickled.getvalue()
