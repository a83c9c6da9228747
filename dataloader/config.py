"""How a split becomes batches: what the user decides."""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from evenrank.core.errors import ConfigError
from evenrank.dataloader.batch import JaggedBatch, SemanticIdBatch, SequenceBatch
from evenrank.dataloader.collate.semantic_ids import CodeTable, SemanticIdCollate, read_codes
from evenrank.dataloader.collate.sequences import Collate, SequenceCollate

Batch = TypeVar("Batch", bound=JaggedBatch)

ORDERS = ("shuffle", "rows", "time")
# Actions are int32 codes, so there are no more bits than these.
_MAX_TASKS = 31


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadConfig(Generic[Batch]):
    """What configurations of all kinds of batches have in common."""

    batch_size: int  # rows of every batch, per rank
    split: str = "train"
    max_history_length: int = 512  # events; longer histories keep their newest
    # "shuffle": another permutation each epoch. "rows": the order of the rows. "time": that of the rows' last events,
    # for training in one pass over time. Streams and mixtures are always shuffled.
    order: str = "shuffle"
    seed: int = 0
    drop_last: bool = False  # leave out the last step of an epoch if it does not fill every rank
    num_workers: int = 0  # threads that collate ahead; 0: the caller's thread collates
    # Batches that are made at once, in one array, which spreads the cost of calls. Workers are up to twice that ahead.
    prefetch: int = 16
    persistent_workers: bool = False  # keep the threads from one epoch to the next
    pin_memory: bool = False  # page-locked batches, for copies to a GPU that overlap with work

    _LEAST: ClassVar[dict[str, int]] = {"batch_size": 1, "max_history_length": 0, "num_workers": 0, "prefetch": 1}

    def __post_init__(self) -> None:
        for name, least in self._LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.order not in ORDERS:
            raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")

    @abstractmethod
    def make_collate(self) -> Collate[Batch]:
        """Return what makes batches of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig(ReadConfig[SequenceBatch]):
    """Batches of histories and candidates: SequenceBatch."""

    # The last events of each user; users with fewer events are left out. Rows that say how many events are to be
    # predicted (of the eval splits leave-last and time) have no more candidates than those.
    max_num_candidates: int = 0
    # With candidates, labels are their actions; without, and with num_tasks above 0, those of the history. 0 or 1: an
    # action is one class of several. Above 1: each of its low bits is a task (`training.label_bits`); others are cut.
    num_tasks: int = 0
    candidate_actions: bool = False  # the candidates' actions are part of the `action` feature too
    # Further event columns that become features: `timestamp_ms` (of history and candidates) or those that the dataset
    # brings (where `action` is).
    extra_events: tuple[str, ...] = ()

    _LEAST: ClassVar[dict[str, int]] = {**ReadConfig._LEAST, "max_num_candidates": 0, "num_tasks": 0}

    def __post_init__(self) -> None:
        ReadConfig.__post_init__(self)
        if self.num_tasks > _MAX_TASKS:
            raise ConfigError(f"num_tasks must be at most {_MAX_TASKS}, the bits of an action, got {self.num_tasks}")

    def make_collate(self) -> SequenceCollate:
        """Return what makes batches of samples."""
        return SequenceCollate(
            max_history_length=self.max_history_length,
            max_num_candidates=self.max_num_candidates,
            num_tasks=self.num_tasks,
            candidate_actions=self.candidate_actions,
            extra_events=tuple(self.extra_events),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SemanticIdConfig(ReadConfig[SemanticIdBatch]):
    """Batches of semantic ids: SemanticIdBatch. The last event of each user is the target."""

    # The items' codes: a .pt or .npy file of whole numbers [levels, items], -1 for no code; or a table.
    codes: Path | str | CodeTable
    codebook_sizes: tuple[int, ...] | None = None  # per level, of a file; None: the largest code + 1
    label_offsets: bool = False  # labels are tokens, with the offsets of their levels, instead of codes

    def make_collate(self) -> SemanticIdCollate:
        """Read the codes and return what makes batches of samples."""
        return SemanticIdCollate(
            table=self.codes if isinstance(self.codes, CodeTable) else read_codes(self.codes, self.codebook_sizes),
            max_history_length=self.max_history_length,
            label_offsets=self.label_offsets,
        )
