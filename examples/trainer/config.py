"""`TrainConfig`: the settings of a training job. Each is an option of `scripts/train.py` and a key of its TOML file."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from evenrank.core.errors import ConfigError
from evenrank.core.expressions import Expression
from evenrank.core.rules import AllBut, AppliesTo, Bounds, Count, NonNegative, OneOf, Option, Parsed, Where
from evenrank.core.settings import Settings, rules_of
from evenrank.dataloader.balance.partition.strategies import DEFAULT_TOLERANCE, STRATEGIES

KEPT = "kept"
"""Marks a setting that a job must keep when it resumes."""
BALANCES = ("no-exchange", "all-to-all", "all-gather", "none")
PIPELINES = ("none", "sparse-dist", "prefetch")

SHARDED = AppliesTo(embeddings=("sharded",))
BALANCED = AppliesTo(balance=AllBut(("none",)))
WINDOWS = AppliesTo(time_windows=AllBut((None,)))
FILTERED = AppliesTo(time_windows=AllBut((None,)), targets=AllBut((None,)), min_history=AllBut((0,)))
_FEATURE, _COLUMNS = (Option(f"NAME={of}:ROWS", parse=tuple) for of in ("EXPRESSION", "COLUMN,..."))
_CROSS = re.compile(r"(\w+)=(\w+(?:,\w+)*):(\d{1,18})")
_TARGET_FEATURE = re.compile(r"(\w+)=([^=].*?)(?::(\d{1,18}))?")


def _parse_window(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"profile must be START:STOP, steps from 0 on, such as 100:110, got {text!r}")
    return int(found[1]), int(found[2])


class OfTarget(NamedTuple):
    """A feature of the target, or a cross, as it is written in an option."""

    name: str
    of: str
    """An expression, or columns divided by commas."""
    rows: int
    """Of its table; 0: it has none, and is a part of crosses alone."""


def parse_cross(text: str) -> OfTarget:
    """Return a cross; a ConfigError unless it is NAME=COLUMN,...:ROWS."""
    if (found := _CROSS.fullmatch(text)) is None or not int(found[3]):
        form = "NAME=COLUMN,...:ROWS, such as user_artist=user_id,artist_id:10000000"
        raise ConfigError(f"crosses must be {form}, got {text!r}")
    return OfTarget(found[1], found[2], int(found[3]))


def parse_target_feature(text: str) -> OfTarget:
    """Return a feature of the target; a ConfigError unless it is NAME=EXPRESSION or NAME=EXPRESSION:ROWS."""
    if (found := _TARGET_FEATURE.fullmatch(text)) is None:
        form = "NAME=EXPRESSION or NAME=EXPRESSION:ROWS, such as hour=timestamp_ms // 3600000 % 24:24"
        raise ConfigError(f"target_features must be {form}, got {text!r}")
    Expression(found[2])
    return OfTarget(found[1], found[2], int(found[3] or 0))


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
    label: Annotated[str | None, KEPT, AppliesTo(num_tasks=(1,))] = None
    """Column of events with integers that are the labels, in place of actions: positive from positive_action on."""
    max_num_candidates: Annotated[Count | None, KEPT] = None
    """Only the last events of a sample are targets, at most so many, each predicted from the events before all
    of them. Default: all events of the history; with --time-windows, 10; where a sample must have one target, 1."""
    targets: Annotated[str | None, Parsed(Expression), KEPT] = None
    """Condition of the events that are targets, each once per epoch, such as `action in (1, 4)`. Default: all."""
    min_history: Annotated[NonNegative, KEPT] = 0
    """How many earlier events of its user a target has at least."""
    within: Annotated[Literal["shuffle", "time", "user"], KEPT, FILTERED] = "shuffle"
    """Order of the targets of an epoch or window: `user`, those of a user one after the other; `time`; `shuffle`."""
    segment: Annotated[float, Bounds(above=0, at_most=1), KEPT, AppliesTo(within=("shuffle",))] = 1.0
    """Shuffle the targets, ordered by user, only within segments of this share of an epoch or window."""
    user_id: Annotated[bool, KEPT] = False
    """Put the user's id in front of the history, as a token."""
    target_features: Annotated[tuple[Annotated[str, Parsed(parse_target_feature)], ...], KEPT, _FEATURE] = ()
    """Repeatable. Put a feature of the target in front of the history, as a token, with a table of so many
    rows, such as `hour=timestamp_ms // 3600000 % 24:24`. Without ROWS it is no token, but crosses may name it."""
    crosses: Annotated[tuple[Annotated[str, Parsed(parse_cross)], ...], KEPT, _COLUMNS] = ()
    """Repeatable. Put a hash of several columns of the target in front of the history, as a token, such as
    `user_artist=user_id,artist_id:10000000`."""
    item_features: Annotated[tuple[str, ...], KEPT] = ()
    """Features of items, ids of the dataset's table, whose embeddings are added to those of items."""
    max_history_length: Annotated[Count, KEPT] = 512
    """Events per sample; longer histories keep their newest."""
    pools: Annotated[tuple[int, ...], KEPT] = ()
    """Actions of histories, of each of which the newest are kept, max_history_length in all. Default: the newest
    events, whatever their action."""
    pools_within: Annotated[Count, KEPT, AppliesTo(pools=Where("ACTION", bool))] = 20_000
    """Look at so many events before the target, of all actions."""
    stochastic_alpha: Annotated[float | None, Bounds(at_least=1, at_most=2), KEPT] = None
    """Train a random part of histories longer than max_history_length^(alpha / 2) events, another one in each epoch;
    the lower, the fewer events. Default: train them whole, as they are evaluated."""
    stochastic_newest: Annotated[NonNegative, KEPT, AppliesTo(stochastic_alpha=AllBut((None,)))] = 0
    """Of such a part, always the newest so many events."""
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
    routing: Annotated[Literal["continuous", "hash_roundrobin"], KEPT, SHARDED] = "continuous"
    """Which rank has a row of a sharded table: ranges of ids, as they are or permuted."""
    pipeline: Annotated[str, OneOf(PIPELINES)] = "none"
    """TorchRec's training pipeline; `prefetch` on GPUs only."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the layers; `auto`: bf16 on GPUs, else fp32."""
    epochs: Annotated[Count, AppliesTo(time_windows=(None,))] = 1
    """Passes over the training split."""
    time_windows: Annotated[str | None, KEPT] = None
    """Train the events of a window of time, such as 6h, 1d or 1w, then those of the next one, each once, and
    evaluate on the window that follows. Default: train all events in any order."""
    time_windows_start: Annotated[str | None, KEPT, WINDOWS] = None
    """The begin of the first window, in ISO 8601; earlier events are only in histories. `first`: the first target.
    Default: the first event."""
    evaluate_window: Annotated[Count | None, KEPT, WINDOWS] = None
    """Train the windows before this one, numbered from 0, and evaluate on it each time. Default: train all but the
    last, and evaluate on the window that follows the one that is trained."""
    held_out: Annotated[float | None, Bounds(above=0, below=1), KEPT, WINDOWS] = None
    """Share of users who are not trained, by a hash of their id; only they are evaluated. Default: train and evaluate
    all users."""
    held_out_salt: Annotated[NonNegative, KEPT, AppliesTo(held_out=AllBut((None,)))] = 0
    """Of the hash: another salt holds out other users."""
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
        needs_one = self.targets or self.min_history or self.held_out or self.target_features or self.crosses
        return self.max_num_candidates or (1 if needs_one else 0 if self.time_windows is None else 10)

    @property
    def profile_window(self) -> tuple[int, int] | None:
        """The steps to profile, as (start, stop)."""
        return None if self.profile is None else _parse_window(self.profile)

    def kept(self) -> dict[str, Any]:
        """Return the settings that a job must keep when it resumes, as JSON has them."""
        values = {name: getattr(self, name) for name, rules in rules_of(type(self)).items() if KEPT in rules}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def where(self, *, is_trained: bool) -> str | None:
        """Return the condition of the targets that are trained, or evaluated."""
        conditions = [] if self.targets is None else [f"({self.targets})"]
        if self.held_out is not None:
            hashed = f"fraction(user_id, {self.held_out_salt})"
            conditions.append(f"{hashed} {'<' if is_trained else '>='} {1 - self.held_out}")
        return " and ".join(conditions) or None
