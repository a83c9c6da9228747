"""`LoaderConfig`, `Negatives`: the settings of loaders, with their defaults and checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch

from evenrank.core.errors import ConfigError
from evenrank.core.rules import PER_RANK, AppliesTo, Bounds, Count, Needs, NonNegative, OneOf, Seed, Valid
from evenrank.core.settings import Settings
from evenrank.dataloader.batches.token_padding import TokenSteps
from evenrank.dataloader.codes import CodeTable
from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.datasets.inference_requests import Requests as Requests
from evenrank.datasets.mixture import Mixture as Mixture
from evenrank.datasets.order import ORDERS, Order, resolve_order
from evenrank.datasets.schema import ACTION, ITEM_ID, MAX_HISTORY_LENGTH, TIMESTAMP_MS
from evenrank.datasets.slices import Targets as Targets
from evenrank.datasets.slices import TimeWindows as TimeWindows

_MAX_TASKS = 31  # bits of an action, an int32 that is not negative
_NO_CODES = AppliesTo(codes=(None,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Negatives(Settings):
    """Settings of the negatives of each sample: `SequenceBatch.negatives` and `log_q`."""

    count: Count
    """Items drawn per sample, with replacement."""
    by: Literal["uniform", "popularity"] = "uniform"
    """`uniform`: over all ids but 0 or, where ids are not dense, the items of the split `train`. `popularity`: in
    proportion to an item's events in `train`, to the power of alpha; streams count events of all splits."""
    alpha: Annotated[float, Bounds(at_least=0, at_most=8)] = 0.75
    """1: in proportion to events, as targets of other samples are distributed; 0: uniform over items with events."""
    exclude_own: bool = True
    """Draw no item of the sample's row, future events included. `log_q` does not depend on this option."""
    hard: Annotated[Path | str | None, Needs("num_hard")] = None
    """Parquet file of hard negatives: `item_id` int64, one row per item, and `negatives` list<int64>."""
    num_hard: Annotated[NonNegative, Needs("hard")] = 0
    """Hard negatives of a sample's last event, without replacement and without its targets; missing ones are replaced
    by drawn negatives."""
    fixed: bool = False
    """Give a sample the same negatives each time, for evaluation. False: draw others in each epoch."""
    known_at: bool = False
    """Draw only items with an event of `train` up to the time of the sample's first target, of which `log_q` then is
    the logarithm of the probability; before the first event, only the first item. Streams cannot."""
    counted: Annotated[Literal["all", "before"], AppliesTo(by=("popularity",))] = "all"
    """`before`: with `TimeWindows`, count only events before the begin of the sample's window; where there are none,
    draw all items uniformly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools(Settings):
    """Settings of histories that are made of some kinds of events, in the order of time."""

    values: Annotated[tuple[int, ...], Valid(lambda given: len(given) == len(set(given)) > 0, "different integers")]
    """Values of `column` that tell the kinds apart; events with other values are in no history."""
    column: str = ACTION
    """Column of events, of integers."""
    each: bool = True
    """Take the newest `max_history_length // len(values)` events of each kind. False: the newest `max_history_length`
    of all of them."""
    within: Count = 20_000
    """Look at so many events before the candidates, of all kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StochasticLength(Settings):
    """Settings of histories of which a random part is trained, another one in each epoch.

    Of histories up to N = `max_history_length` events, those of n > N^(alpha / 2) are whole with probability
    N^alpha / n^2, else cut to N^(alpha / 2) events (Zhai et al., "Actions speak louder than words", 2024). Drawn by the
    sample, the epoch and the loader's seed.
    """

    alpha: Annotated[float, Bounds(at_least=1, at_most=2)]
    """2: all histories are whole; the lower, the fewer events are trained."""
    newest: NonNegative = 0
    """The newest events of a history that is cut, all of which it keeps; the others are drawn uniformly, without
    replacement, and stay in the order of time."""

    def limit(self, max_history_length: int) -> float:
        """Return the events of a history that is cut, before rounding down: N^(alpha / 2)."""
        return round(math.pow(max_history_length, self.alpha / 2), 9)  # 1024^0.7, by floats, is below 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Cross(Settings):
    """Settings of an id that is hashed from several columns: XXH64 of their little-endian int64s, modulo `size`."""

    of: Annotated[tuple[str, ...], Valid(len, "at least one column")]
    """`user_id`, contextual features, columns of events and features of items, of the target; `target_features`."""
    size: Count
    """Rows of the table of embeddings."""
    seed: NonNegative = 0
    """Of the hash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig(Settings):
    """Settings of loaders. Batches are SequenceBatches with histories and candidates.

    With `codes` they are SemanticIdBatches, and the last event of each user is the target.
    """

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
    """Order of the samples in an epoch. `shuffle`: a new permutation each epoch. `rows`: ascending rows.
    `Targets(where="action == 1")`: each such event is a target. `TimeWindows(every="1d")`: each epoch has the samples
    of one day. `Requests()`: the recorded requests of all splits, by time. `register_order` adds your own. Streams and
    mixtures are always shuffled."""
    seed: Seed = 0
    """Seed of the permutations and of the generators passed to a transform; the same on all ranks."""
    drop_last: bool = False
    """Leave out the last step if it does not fill every rank."""
    pad_tokens_to: TokenSteps | None = None
    """Pad the events of a batch to a multiple of this number or, of a tuple, to the next total, so that `torch.compile`
    and CUDA graphs see few shapes. Events are then in padding rows too, of which a batch gets a constant number more;
    see `JaggedBatch.real_values`. None: padding rows are empty."""
    num_workers: Annotated[NonNegative, PER_RANK] = 0
    """Threads per rank that collate in the background; 0: the calling thread collates."""
    prefetch: Annotated[Count, PER_RANK] = 16
    """Batches collated together in one array. Workers run up to `num_workers` such groups ahead."""
    persistent_workers: Annotated[bool, PER_RANK] = False
    """Keep the threads between epochs."""
    pin_memory: Annotated[bool, PER_RANK] = False
    """Return batches in pinned memory, if the training loop copies them to a GPU itself."""
    device: Annotated[torch.device | str | None, PER_RANK] = None
    """Device of the batches; None: the CPU, as a Balancer needs. The thread that makes batches also uploads them to a
    CUDA device, which then holds up to `(num_workers + 1) * prefetch` batches."""
    key_maps: Mapping[str, KeyMap] = field(default_factory=dict, hash=False)
    """Features whose keys are replaced by the rows of their tables. A machine's first loader caches a mapped column."""
    max_num_candidates: NonNegative = 0
    """The last events of each user become candidates; users with fewer events are left out. Rows with a number of
    targets (in eval splits `leave-last` and `time`) have at most that many candidates. With codes 1: the target."""
    num_tasks: Annotated[int, Bounds(at_least=0, at_most=_MAX_TASKS), _NO_CODES] = 0
    """With candidates, their actions are the labels; without candidates and above 0, the actions of the history are. 0
    or 1: an action is one class of many. Above 1: each of the `num_tasks` low bits of an action is a binary task (see
    `training.label_bits`), and higher bits are cleared."""
    candidate_actions: Annotated[bool, _NO_CODES] = False
    """Include the candidates' actions in the `action` feature."""
    extra_events: Annotated[tuple[str, ...], _NO_CODES] = ()
    """Further list columns as features: `timestamp_ms`, for history and candidates, or columns that the dataset adds,
    for the same events as `action`. Columns of floats are in `float_features`."""
    pools: Annotated[Pools | None, _NO_CODES] = None
    """Make histories of the newest events of some kinds. None: of the newest events."""
    stochastic_length: StochasticLength | None = None
    """Cut long histories to events that are drawn anew in each epoch. None: train them whole, as for evaluation."""
    item_features: Annotated[tuple[str, ...], _NO_CODES] = ()
    """Features of items, of the dataset's `item_features.parquet`, for the same events as `item_id`; 0 for items
    without a row. No row stores them: they are looked up when batches are made."""
    target_features: Annotated[Mapping[str, str], _NO_CODES] = field(default_factory=dict, hash=False)
    """Features of the target, one value per sample: expressions of its columns, of `user_id`, contextual features and
    features of items, such as `{"hour": "timestamp_ms // 3600000 % 24"}`. Needs `max_num_candidates` 1."""
    crosses: Annotated[Mapping[str, Cross], _NO_CODES] = field(default_factory=dict, hash=False)
    """Further features of the target, by name: ids that are hashed from several columns."""
    label: Annotated[str | tuple[str, ...] | None, _NO_CODES] = None
    """Column of events with the labels, also without `num_tasks`: integers become `labels`, floats `float_labels`; a
    tuple may have one of each. None: the actions or, without candidates and `num_tasks`, the next items."""
    weight: Annotated[str | None, _NO_CODES] = None
    """Column of events, or contextual feature of floats, with the weight of each loss token: `weights` of a batch."""
    negatives: Annotated[Negatives | None, _NO_CODES] = None
    """Draw negatives for the candidates or, without candidates and labels, for the items after the first."""
    candidate_sets: Annotated[Path | str | None, _NO_CODES] = None
    """Parquet file of the items that targets are ranked among, for evaluation: `user_id` int64, one row per user, and
    `candidates` list<int64>, ids of the dataset. Users without a row are left out."""
    codes: Path | str | CodeTable | None = None
    """Codes of the items, for SemanticIdBatches: a folder of `evenrank semantic-ids`; a `.pt` or `.npy` file of
    integers [levels, items], -1 for no code, or [levels, items, codes of an item], -1 where an item has fewer; or a
    table."""
    codebook_sizes: Annotated[tuple[int, ...] | None, Needs("codes")] = None
    """Codes per level of a file; None: those of the folder, or the largest code of the level + 1."""
    label_offsets: Annotated[bool, Needs("codes")] = False
    """Make labels tokens, with the offsets of their levels, instead of codes."""
    history_labels: Annotated[bool, Needs("codes")] = False
    """Also label each event of the history with the codes of the next event."""
    candidate_feature: Annotated[bool, Needs("codes")] = False
    """Add a feature `candidate_id`, the tokens of the target, for teacher forcing."""
    draw_alternatives: Annotated[bool, Needs("codes")] = False
    """Draw one of an item's codes for each event of histories and targets, anew in each epoch. False: use the first
    code, as for evaluation."""

    def _check(self) -> None:
        if self.pin_memory and not str(self.device or "cpu").startswith("cpu"):
            raise ConfigError(
                f"batches are handed out on device={str(self.device)!r}, so nothing copies them from pinned memory; "
                "leave pin_memory out"
            )
        object.__setattr__(self, "key_maps", dict(self.key_maps))  # a copy that no caller changes later
        for name in self.key_maps:
            if name in (ACTION, TIMESTAMP_MS):
                raise ConfigError(f"key_maps cannot have {name!r}: actions are labels too, and times are no keys")
        if self.codes is not None:
            self._check_codes()
        if (kind := resolve_order(self.order).targets) and not self.max_num_candidates:
            raise ConfigError(f"{kind} have candidates as targets; pass max_num_candidates of at least 1")
        if self.num_tasks > 1 and ACTION not in self.labels:
            raise ConfigError(f"num_tasks above 1 are bits of actions, got label {self.label!r}; use num_tasks 0 or 1")
        made = {**self.target_features, **self.crosses}
        if made and self.max_num_candidates != 1:
            raise ConfigError(
                f"{next(iter(made))!r} is a feature of one target, got max_num_candidates={self.max_num_candidates}; "
                "set it to 1"
            )
        if self.pools is not None and self.pools.column in self.key_maps:
            raise ConfigError("pools do not go with a key map of their column; leave one out")
        if (drawn := self.stochastic_length) is not None and drawn.newest > drawn.limit(self.max_history_length):
            raise ConfigError(
                f"stochastic_length keeps the newest {drawn.newest} events, but cuts histories to "
                f"{int(drawn.limit(self.max_history_length))}; lower newest, or raise alpha or max_history_length"
            )
        is_before = self.negatives is not None and self.negatives.counted == "before"
        if is_before and not isinstance(resolve_order(self.order), TimeWindows):
            raise ConfigError(
                f"counted='before' is before a window of time, got order {self.order!r}; pass TimeWindows(every='1d')"
            )
        if self.negatives and not self.max_num_candidates and self.labels:
            raise ConfigError("negatives are for items that are predicted, not actions; set max_num_candidates to 1")

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of the labels of events; empty where items are predicted."""
        if not self.label:
            return (ACTION,) if self.num_tasks or (self.max_num_candidates and self.codes is None) else ()
        return (self.label,) if isinstance(self.label, str) else self.label

    def _check_codes(self) -> None:
        if self.max_num_candidates > 1:
            raise ConfigError(
                f"semantic ids have one target each, the last event, got max_num_candidates={self.max_num_candidates}; "
                "leave it out"
            )
        object.__setattr__(self, "max_num_candidates", 1)
        if ITEM_ID in self.key_maps:
            raise ConfigError(
                f"key_maps cannot have {ITEM_ID!r} with codes, which batches have in place of items; leave it out: "
                "tables of codes are small"
            )
