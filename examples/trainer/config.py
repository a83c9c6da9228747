"""`TrainConfig`: the settings of a training job. Each is an option of `scripts/train.py` and a key of its TOML file."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from evenrank.core.errors import ConfigError
from evenrank.core.rules import AllBut, AppliesTo, Bounds, Count, NonNegative, OneOf, Parsed
from evenrank.core.settings import Settings, rules_of
from evenrank.dataloader.balance.partition.strategies import DEFAULT_TOLERANCE, STRATEGIES

KEPT = "kept"
"""Marks a setting that a job must keep when it resumes."""
BALANCES = ("no-exchange", "all-to-all", "all-gather", "none")
PIPELINES = ("none", "sparse-dist", "prefetch")

SHARDED = AppliesTo(embeddings=("sharded",))
BALANCED = AppliesTo(balance=AllBut(("none",)))


def _parse_window(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"profile must be START:STOP, steps from 0 on, such as 100:110, got {text!r}")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Settings):
    """The settings of a job, the same on all ranks."""

    data: str | None = None
    """Folder that evenrank preprocess wrote. Default: synthetic data, made below OUT."""
    out: str = "out/train"
    """Folder of checkpoints and logs. A job that finds its checkpoints there continues."""
    positive_action: Annotated[int, KEPT, AppliesTo(num_tasks=(1,))] = 1
    """One task: events with at least this action are positive."""
    num_tasks: Annotated[Count, KEPT] = 1
    """Number of tasks. Above 1, each of the low bits of an action is a task."""
    max_num_candidates: Annotated[Count | None, KEPT] = None
    """Only the last events of a sample are targets, at most so many, each predicted from the events before all
    of them. Default: all events of the history; with --time-windows, 10."""
    user_id: Annotated[bool, KEPT] = False
    """Put the user's id in front of the history, as a token."""
    max_history_length: Annotated[Count, KEPT] = 512
    """Events per sample; longer histories keep their newest."""
    balance: Annotated[str, OneOf(BALANCES)] = "no-exchange"
    """How samples get to the ranks that train them: with `no-exchange` each rank reads what it trains; a Balancer moves
    them by `all-to-all` or by `all-gather`; `none`: each rank trains its share, unbalanced."""
    strategy: Annotated[str, OneOf(STRATEGIES), BALANCED] = "lpt-swap"
    """How samples are distributed: `lpt-swap` balances best, `min-move` moves least."""
    tolerance: Annotated[float, Bounds(at_least=0, below=1), AppliesTo(strategy=AllBut(("none", "karmarkar-karp")))] = (
        DEFAULT_TOLERANCE
    )
    """Relative tolerance, below 1: a heaviest rank this far above the lower bound is good enough."""
    max_tokens_per_rank: Annotated[Count | None, BALANCED] = None
    """Limit to the tokens of a rank in a step. Default: none."""
    cost: Annotated[str | None, BALANCED] = None
    """File of a measured cost, written by MeasuredCost.save. Default: the FLOPs of the model."""
    window: Annotated[Count, AppliesTo(balance=("no-exchange",))] = 1
    """No exchange: steps whose samples may change steps, to make them more even."""
    refit_every: Annotated[Count | None, BALANCED] = None
    """Fit the cost to the measured times of all ranks every so many steps. Default: never."""
    compare_every: Annotated[int | None, Bounds(at_least=2), BALANCED] = None
    """Leave one step in so many unbalanced, so that the log has the measured speed-up. Default: none."""
    batch_size: Count = 32
    """Samples per rank and step."""
    num_workers: NonNegative = 1
    """Threads per rank that collate batches."""
    hidden: Annotated[Count, KEPT] = 64
    """Width of the layers."""
    heads: Annotated[Count, KEPT] = 2
    """Attention heads of a layer, each hidden / heads wide."""
    layers: Annotated[Count, KEPT] = 2
    """Number of layers."""
    attention: str = "auto"
    """Attention by `padded` tensors, jagged `triton` kernels, or `auto`."""
    recompute: bool = False
    """Compute activations again in the backward pass, to save memory."""
    embedding_dim: Annotated[Count, KEPT] = 32
    """Width of the embedding tables."""
    dropout: Annotated[float, Bounds(at_least=0, below=1)] = 0.0
    """Share of activations that training drops."""
    embeddings: Annotated[Literal["replicated", "sharded"], KEPT] = "replicated"
    """All tables on each rank, or large ones sharded."""
    min_sharded_rows: Annotated[Count, KEPT, SHARDED] = 1000
    """Sharded tables: those with at least so many rows are sharded."""
    pipeline: Annotated[str, OneOf(PIPELINES)] = "none"
    """TorchRec's training pipeline; `prefetch` on GPUs only."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the layers; `auto`: bf16 on GPUs, else fp32."""
    epochs: Annotated[Count, AppliesTo(time_windows=(None,))] = 1
    """Passes over the training split."""
    time_windows: Annotated[str | None, KEPT] = None
    """Train the events of a window of time, such as 6h, 1d or 1w, then those of the next one, each once, and
    evaluate on the window that follows. Default: train all events in any order."""
    time_windows_start: Annotated[str | None, KEPT, AppliesTo(time_windows=AllBut((None,)))] = None
    """The begin of the first window, in ISO 8601; earlier events are only in histories. Default: the first event."""
    max_steps: Count | None = None
    """End after this many steps, if the epochs have more."""
    learning_rate: Annotated[float, Bounds(at_least=0)] = 1e-3
    """Of AdamW, after the warm-up."""
    embedding_learning_rate: Annotated[float, Bounds(at_least=0), SHARDED] = 0.02
    """Of row-wise Adagrad, for sharded tables."""
    warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly."""
    seed: NonNegative = 0
    """Of weights, order and dropout."""
    eval_every: Count | None = None
    """Steps between evaluations, besides those after each epoch or window."""
    eval_steps: Count | None = None
    """Steps of an evaluation, the first of the split. Default: all."""
    checkpoint_every: Count | None = None
    """Steps between checkpoints, besides those after each epoch or window."""
    log_every: Count = 10
    """Steps between lines of the log."""
    profile: Annotated[str | None, Parsed(_parse_window)] = None
    """START:STOP. Write a Chrome trace of these steps of this run, counted from 0, on rank 0. Default: none."""

    def _check(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"hidden must be a multiple of heads, got hidden={self.hidden} and heads={self.heads}")

    def uses_bf16(self, device_type: str) -> bool:
        """Return whether layers compute in bfloat16 on a type of device."""
        return self.precision == "bf16" or (self.precision == "auto" and device_type == "cuda")

    @property
    def num_candidates(self) -> int:
        """The most targets of a sample of ranking; 0: its whole history."""
        return self.max_num_candidates or (0 if self.time_windows is None else 10)

    @property
    def profile_window(self) -> tuple[int, int] | None:
        """The steps to profile, as (start, stop)."""
        return None if self.profile is None else _parse_window(self.profile)

    def kept(self) -> dict[str, Any]:
        """Return the settings that a job must keep when it resumes."""
        return {name: getattr(self, name) for name, rules in rules_of(type(self)).items() if KEPT in rules}
