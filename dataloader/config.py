"""`LoaderConfig`, `SemanticIdConfig`: the settings of loaders, with their defaults and checks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Generic

import torch

from evenrank.core.errors import ConfigError
from evenrank.core.rules import PER_RANK, Bounds, Count, NonNegative, OneOf, Seed
from evenrank.core.settings import Settings
from evenrank.dataloader.batches.batch import Batch, SemanticIdBatch, SequenceBatch
from evenrank.dataloader.collate.negatives import Negatives, NegativeSampler, Sources
from evenrank.dataloader.collate.semantic_ids import CodeTable, SemanticIdCollate, read_codes
from evenrank.dataloader.collate.sequences import Collate, SequenceCollate
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.datasets.mixture import Mixture as Mixture
from evenrank.datasets.order import ORDERS, Order, resolve_order
from evenrank.datasets.schema import ACTION, ITEM_ID, MAX_HISTORY_LENGTH, TIMESTAMP_MS
from evenrank.datasets.slices import Requests as Requests
from evenrank.datasets.slices import TimeWindows as TimeWindows

_MAX_TASKS = 31  # bits of an action, an int32 that is not negative


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadConfig(Settings, ABC, Generic[Batch]):
    """Settings of all kinds of batches."""

    batch_size: Count
    """Rows of every batch, per rank."""
    split: str = "train"
    """Name of the split to read."""
    max_history_length: NonNegative = MAX_HISTORY_LENGTH
    """Events of a history; longer histories keep their newest ones."""
    user_id: bool = False
    """Add a feature `user_id`, one id per sample, below `manifest.vocabulary_sizes["user_id"]`."""
    context: tuple[str, ...] | None = None
    """The contextual features of batches, in this order; None: all of the dataset."""
    order: Annotated[str, OneOf(ORDERS)] | Order = "shuffle"
    """Order of the samples in an epoch. `shuffle`: another permutation each epoch. `rows`: ascending rows.
    `TimeWindows(every="1d")`: each epoch has the samples of another day. `Requests()`: the recorded requests of all
    splits, by time. Or one of your own, or its name (`register_order`). Streams and mixtures are always shuffled."""
    seed: Seed = 0
    """Seed of the permutations and of the generators passed to a transform; the same on all ranks."""
    drop_last: bool = False
    """Leave out a last step that does not fill every rank."""
    num_workers: Annotated[NonNegative, PER_RANK] = 0
    """Threads per rank that collate in the background; 0: the calling thread collates."""
    prefetch: Annotated[Count, PER_RANK] = 16
    """Batches collated together in one array. Workers run up to `num_workers` such groups ahead."""
    persistent_workers: Annotated[bool, PER_RANK] = False
    """Keep the threads between epochs."""
    pin_memory: Annotated[bool, PER_RANK] = False
    """Return batches in pinned memory, for asynchronous copies to a GPU. With `device`, they are there already."""
    device: Annotated[torch.device | str | None, PER_RANK] = None
    """Where batches are handed out; None: on the CPU, as a Balancer needs them. A CUDA device: the thread that makes
    batches uploads them too, so the device holds up to `(num_workers + 1) * prefetch` of them."""
    key_maps: Mapping[str, KeyMap] = field(default_factory=dict, hash=False)
    """Features whose keys are replaced by the rows of their tables. A machine's first loader caches a mapped column."""

    def _check(self) -> None:
        object.__setattr__(self, "key_maps", dict(self.key_maps))  # a copy that no caller changes later
        for name in self.key_maps:
            if name in (ACTION, TIMESTAMP_MS):
                raise ConfigError(f"key_maps cannot have {name!r}: actions are labels too, and times are no keys")

    @property
    def has_requests(self) -> bool:
        """Whether samples are requests, so that batches have their times."""
        return resolve_order(self.order).has_requests

    @abstractmethod
    def make_collate(self, sources: Sources = ()) -> Collate[Batch]:
        """Return the callable that makes batches of samples of these datasets."""

    def _settings_of(self, collate: type[Collate[Any]]) -> dict[str, Any]:
        """Return the settings that a kind of collate takes, which have the same names there."""
        return {entry.name: getattr(self, entry.name) for entry in fields(collate) if hasattr(self, entry.name)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig(ReadConfig[SequenceBatch]):
    """Settings for batches of histories and candidates: SequenceBatch."""

    max_num_candidates: NonNegative = 0
    """The last events of each user become candidates; users with fewer events are left out. Rows with a number of
    targets (in eval splits `leave-last` and `time`) have at most that many candidates."""
    num_tasks: Annotated[int, Bounds(at_least=0, at_most=_MAX_TASKS)] = 0
    """With candidates, labels are their actions; without candidates and above 0, labels are the history's actions. 0 or
    1: an action is one class of many. Above 1: each of its `num_tasks` low bits is a binary task (see
    `training.label_bits`), and higher bits are cleared."""
    candidate_actions: bool = False
    """Include the candidates' actions in the `action` feature."""
    extra_events: tuple[str, ...] = ()
    """Further list columns as features: `timestamp_ms`, for history and candidates, or columns that the dataset adds,
    for the same events as `action`. Columns of floats are in `float_features`."""
    label: str | None = None
    """Column of integers of the labels, also without `num_tasks`; None: the actions."""
    target: str | None = None
    """Column of integers or floats: `targets`, for regression, of the events that labels are of. Without candidates,
    `num_tasks` and `label`, targets take the place of labels."""
    weight: str | None = None
    """`weights`, one per loss token: a column of events, or a contextual feature of floats, equal for a sample's."""
    negatives: Negatives | None = None
    """Draw negatives for the candidates or, without candidates and labels, for the items after the first."""

    def _check(self) -> None:
        ReadConfig._check(self)
        if (kind := resolve_order(self.order).targets) and not self.max_num_candidates:
            raise ConfigError(f"{kind} have candidates as targets; pass max_num_candidates of at least 1")
        if self.num_tasks > 1 and self.label not in (None, ACTION):
            raise ConfigError(f"num_tasks above 1 are bits of actions, got label {self.label!r}; use num_tasks 0 or 1")
        if self.negatives and not self.max_num_candidates and (self.num_tasks or self.label or self.target):
            raise ConfigError("negatives are for items that are predicted, not actions; set max_num_candidates to 1")

    def make_collate(self, sources: Sources = ()) -> SequenceCollate:
        """Return the callable that makes batches of samples of these datasets."""
        draw, items = self.negatives, self.key_maps.get(ITEM_ID)
        sampler = None if draw is None else NegativeSampler.create(draw, sources, items)
        return SequenceCollate(**self._settings_of(SequenceCollate), sampler=sampler)


@dataclass(frozen=True, kw_only=True, slots=True)
class SemanticIdConfig(ReadConfig[SemanticIdBatch]):
    """Settings for batches of semantic ids: SemanticIdBatch. The last event of each user is the target."""

    codes: Path | str | CodeTable
    """The codes of the items: a `.pt` or `.npy` file of integers [levels, items], -1 for no code, or [levels, items,
    codes of an item], -1 where an item has fewer; or a table."""
    codebook_sizes: tuple[int, ...] | None = None
    """Per level of a file; None: the level's largest code + 1."""
    label_offsets: bool = False
    """Make labels tokens, with the offsets of their levels, instead of codes."""
    history_labels: bool = False
    """Also add the labels of the history: for each of its events, the codes of the next one."""
    candidate_feature: bool = False
    """Add a feature `candidate_id`, the tokens of the target, for teacher forcing."""
    draw_alternatives: bool = False
    """Draw one of an item's codes for each event, of histories and targets, anew in each epoch. False: the first one,
    as for evaluation."""

    def _check(self) -> None:
        ReadConfig._check(self)
        if ITEM_ID in self.key_maps:
            raise ConfigError(
                f"key_maps cannot have {ITEM_ID!r} here: batches have the codes of items; leave it out, their tables "
                "are small"
            )

    def make_collate(self, sources: Sources = ()) -> SemanticIdCollate:
        """Read the codes and return the callable that makes batches of samples."""
        table = self.codes if isinstance(self.codes, CodeTable) else read_codes(self.codes, self.codebook_sizes)
        return SemanticIdCollate(table=table, **self._settings_of(SemanticIdCollate))
