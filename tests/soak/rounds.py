"""Random rounds of a soak test: how a job trains, what goes wrong in it, and how it is resumed."""

import enum
from dataclasses import dataclass

import numpy as np

from evenrank.dataloader.balance.config import EXCHANGES


class Fault(enum.StrEnum):
    """What goes wrong on one rank, in one step."""

    NONE = "none"
    KILLED = "killed"
    STOPPED = "stopped for a moment"
    STOPPED_LONG = "stopped beyond the timeout"
    MODEL_RAISES = "the model raises"
    ON_STEP_RAISES = "on_step raises"
    COST_RAISES = "the cost raises"
    LOADER_RAISES = "the transform or the dataset raises"
    DISK_FULL = "the disk of the metrics is full"
    LEAVES = "leaves the loop"
    ALL_LEAVE = "all ranks leave the loop"
    SAME_DATA = "the dataset is replaced by the same"
    OTHER_DATA = "the dataset is replaced by another one"


LOADERS = ("Loader", "StreamLoader", "StatefulDataLoader", "RandomBatches")
# Their states resume on any number of ranks, with any batch size.
ELASTIC = ("Loader", "StreamLoader")
_STREAM_FAULTS = (Fault.SAME_DATA, Fault.OTHER_DATA)
_FAULTS_OF_RANDOM_BATCHES = (Fault.LOADER_RAISES, *_STREAM_FAULTS)  # cannot happen to them


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What may differ between the job that has a fault and the one that resumes."""

    world_size: int
    batch_size: int
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A job that trains an epoch, the fault that ends it, and the job that resumes it."""

    loader: str
    first: Shape
    resumed: Shape
    strategy: str
    exchange: str
    lookahead: int
    gradients: bool
    """All-reduce over the default group in each step, as of gradients."""
    fault: Fault
    culprit: int
    """The rank that has the fault."""
    step: int
    """The step, or the call, in which it has it."""
    device: str
    """`cpu`, or `cuda`: rank r is on GPU r."""
    seed: int


def draw_round(seed: int, number: int, *, faults: tuple[Fault, ...], device: str = "cpu", max_ranks: int = 5) -> Round:
    """Return a round that depends on the arguments alone."""
    rng = np.random.default_rng([seed, number])
    min_ranks = 2 if device == "cuda" else 1
    loader = str(rng.choice(LOADERS))
    fault = faults[int(rng.integers(len(faults)))]
    if fault in _STREAM_FAULTS:
        loader = "StreamLoader"
    elif fault in _FAULTS_OF_RANDOM_BATCHES and loader == "RandomBatches":
        loader = "Loader"

    def draw_shape() -> Shape:
        return Shape(
            world_size=int(rng.integers(min_ranks, max_ranks + 1)),
            batch_size=int(rng.integers(3, 13)),
            workers=int(rng.integers(0, 2 if loader == "StatefulDataLoader" else 3)),
        )

    first, resumed = draw_shape(), draw_shape()
    if fault == Fault.STOPPED_LONG and first.world_size == 1:  # nobody would notice
        fault = Fault.STOPPED
    return Round(
        loader=loader,
        first=first,
        resumed=resumed if loader in ELASTIC else first,
        strategy=str(rng.choice(["none", "karmarkar-karp", "lpt-swap", "min-move"])),
        exchange=EXCHANGES[int(rng.integers(2))],
        lookahead=int(rng.integers(1, 5)),
        gradients=bool(rng.random() < 0.5),
        fault=fault,
        culprit=int(rng.integers(first.world_size)),
        step=int(rng.integers(0, 5)),  # an epoch of the largest job has four
        device=device,
        seed=int(rng.integers(1000)),
    )
