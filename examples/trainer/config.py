"""`TrainConfig`: the settings of a training job. Each is an option of `scripts/train.py` and a key of its TOML file.

The fields of the record are the only list of settings: `command.py` derives the command line and the keys of the file.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_type_hints

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.partition.strategies import DEFAULT_TOLERANCE
from evenrank.dataloader.routing import MODES

MODELS = ("hstu", "semantic-ids")
TASKS = ("ranking", "retrieval")
PRECISIONS = ("auto", "fp32", "bf16")
EMBEDDINGS = ("replicated", "sharded")
_CANDIDATES_IN_WINDOWS = 10


class AllBut(tuple[Any, ...]):
    """All values of a setting but these; of one whose values users register, others cannot be listed."""

    def __contains__(self, value: object) -> bool:
        return not super().__contains__(value)


# What settings apply to: another one that applies too, with one of these values. With several, one of them is enough.
HSTU = {"model": ("hstu",)}
SEMANTIC_IDS = {"model": ("semantic-ids",)}
RANKING = {"task": ("ranking",)}
RETRIEVAL = {"task": ("retrieval",)}
SHARDED = {"embeddings": ("sharded",)}
BALANCED = {"balance": AllBut(["none"])}
WINDOWS = {"time_windows": AllBut([None])}


def setting(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    kept: bool = False,
    applies_to: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """Declare a setting: its default, its help, what it may be, whether a job that resumes must keep it, and its use.

    One that does not apply to the others is an error if it is given, as it would be ignored.
    """
    metadata = {"help": text, "choices": choices, "at_least": at_least, "kept": kept, "applies_to": applies_to or {}}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The settings of a job, the same on all ranks.

    Raises:
        ConfigError: a setting is of the wrong type or out of range.
    """

    data: str | None = setting(
        None, "Folder that `evenrank preprocess` wrote. Default: synthetic data, made below OUT."
    )
    out: str = setting("out/train", "Folder of checkpoints and logs. A job that finds its checkpoints there continues.")
    model: str = setting("hstu", "The model.", choices=MODELS, kept=True)
    task: str = setting(
        "ranking",
        "What an HSTU model learns: `ranking` predicts actions and is measured by AUC, GAUC of users, accuracy and "
        "normalized entropy; `retrieval` predicts the next item and is measured by Recall@K and NDCG@K, as semantic-id "
        "models are.",
        choices=TASKS,
        kept=True,
        applies_to=HSTU,
    )

    positive_action: int = setting(
        1,
        "Ranking, one task: events with at least this action are positive.",
        kept=True,
        applies_to={"num_tasks": (1,)},
    )
    num_tasks: int = setting(
        1,
        "Ranking: number of tasks. Above 1, each of the low bits of an action is a task.",
        at_least=1,
        kept=True,
        applies_to=RANKING,
    )
    num_negatives: int = setting(
        128,
        "Retrieval: random items per step among which the next one is found.",
        at_least=1,
        applies_to=RETRIEVAL,
    )
    max_num_candidates: int | None = setting(
        None,
        "Ranking: only the last events of a sample are targets, at most so many, each predicted from the events before "
        "all of them. Default: all events of the history; with --time-windows, 10.",
        at_least=1,
        kept=True,
        applies_to=RANKING,
    )
    user_id: bool = setting(False, "Put the user's id in front of the history, as a token.", kept=True)
    max_history_length: int = setting(
        512, "Events per sample; longer histories keep their newest.", at_least=1, kept=True
    )
    codes: str | None = setting(
        None,
        "Semantic ids: .pt or .npy file of codes, integers [levels, items]. Default: random codes.",
        applies_to=SEMANTIC_IDS,
    )
    code_levels: int = setting(3, "Semantic ids: levels of random codes.", at_least=1, applies_to={"codes": (None,)})
    codebook_size: int = setting(
        64, "Semantic ids: random codes of each level.", at_least=2, applies_to={"codes": (None,)}
    )

    balance: str = setting(
        "no-exchange",
        "How samples get to the ranks that train them: with `no-exchange` each rank reads what it trains; a Balancer "
        "moves them by `all-to-all` or by `all-gather`; `none`: each rank trains its share, unbalanced.",
    )
    strategy: str = setting(
        "lpt-swap",
        "How samples are distributed: `lpt-swap` balances best, `min-move` moves least.",
        applies_to=BALANCED,
    )
    tolerance: float = setting(
        DEFAULT_TOLERANCE,
        "Relative tolerance, below 1: a heaviest rank this far above the lower bound is good enough.",
        at_least=0,
        applies_to={"strategy": AllBut(["none", "karmarkar-karp"])},
    )
    max_tokens_per_rank: int | None = setting(
        None, "Limit to the tokens of a rank in a step. Default: none.", at_least=1, applies_to=BALANCED
    )
    cost: str | None = setting(
        None,
        "File of a measured cost, written by MeasuredCost.save. Default: the FLOPs of the model.",
        applies_to=BALANCED,
    )
    window: int = setting(
        1,
        "No exchange: steps whose samples may change steps, to make them more even.",
        at_least=1,
        applies_to={"balance": ("no-exchange",)},
    )
    compare_every: int | None = setting(
        None,
        "Leave one step in so many unbalanced, so that the log has the measured speed-up. Default: none.",
        at_least=2,
        applies_to=BALANCED,
    )
    batch_size: int = setting(32, "Samples per data-parallel rank and step.", at_least=1)
    num_workers: int = setting(1, "Threads per rank that collate batches.", at_least=0)

    hidden: int = setting(64, "Width of the layers.", at_least=1, kept=True)
    heads: int = setting(2, "Attention heads of a layer, each hidden / heads wide.", at_least=1, kept=True)
    layers: int = setting(2, "Number of layers.", at_least=1, kept=True)
    attention: str = setting(
        "auto", "HSTU: attention by `padded` tensors, jagged `triton` kernels, or `auto`.", applies_to=HSTU
    )
    fused_norms: bool = setting(True, "HSTU: layers by fused Triton kernels, on GPUs.", applies_to=HSTU)
    recompute: bool = setting(
        False, "HSTU: compute LayerNorm and SiLU again in the backward pass, to save memory.", applies_to=HSTU
    )
    embedding_dim: int = setting(32, "HSTU: width of the embedding tables.", at_least=1, kept=True, applies_to=HSTU)
    dropout: float = setting(0.0, "Share of activations that training drops.", at_least=0)
    embeddings: str = setting(
        "replicated",
        "HSTU: all tables on each rank, or large ones sharded.",
        choices=EMBEDDINGS,
        kept=True,
        applies_to=HSTU,
    )
    min_sharded_rows: int = setting(
        1000,
        "Sharded tables: those with at least so many rows are sharded.",
        at_least=1,
        kept=True,
        applies_to=SHARDED,
    )
    routing: str = setting(
        "continuous",
        "Sharded tables: which ranks have which keys. `continuous`: ranges of them; `roundrobin`: key modulo ranks; "
        "`hash_roundrobin`: at random, so that no pattern of keys is on few ranks. A job that resumes must keep it, or "
        "be copied by scripts/remap.py.",
        choices=MODES,
        applies_to=SHARDED,
    )
    tensor_parallel: int = setting(
        1, "HSTU: ranks among which the heads of each layer are divided, on equal batches.", at_least=1, applies_to=HSTU
    )
    pipeline: str = setting("none", "TorchRec's training pipeline: none, sparse-dist, or prefetch (GPU only).")
    precision: str = setting("auto", "Of the layers; `auto`: bf16 on GPUs, else fp32.", choices=PRECISIONS)

    epochs: int = setting(1, "Passes over the training split.", at_least=1, applies_to={"time_windows": (None,)})
    time_windows: str | None = setting(
        None,
        "Train the events of a window of time, such as 6h, 1d or 1w, then those of the next one, each event once, and "
        "evaluate on the window that follows. Default: train all events in any order.",
        kept=True,
    )
    time_windows_start: str | None = setting(
        None,
        "The begin of the first window, in ISO 8601; earlier events are only in histories. Default: the first event.",
        kept=True,
        applies_to=WINDOWS,
    )
    max_steps: int | None = setting(None, "End after this many steps, if the epochs have more.", at_least=1)
    learning_rate: float = setting(1e-3, "Of AdamW, after the warm-up.", at_least=0)
    embedding_learning_rate: float = setting(
        0.02, "Of row-wise Adagrad, for sharded tables.", at_least=0, applies_to=SHARDED
    )
    warmup_steps: int = setting(0, "Steps in which the learning rate rises linearly.", at_least=0)
    weight_decay: float = setting(0.0, "Of AdamW.", at_least=0)
    seed: int = setting(0, "Of weights, order, dropout and random codes.", at_least=0)

    eval_every: int | None = setting(
        None, "Steps between evaluations, besides those after each epoch or window.", at_least=1
    )
    eval_steps: int | None = setting(None, "Steps of an evaluation, the first of the split. Default: all.", at_least=1)
    k: int = setting(10, "K of Recall@K and NDCG@K.", at_least=1, applies_to=RETRIEVAL | SEMANTIC_IDS)
    checkpoint_every: int | None = setting(
        None, "Steps between checkpoints, besides those after each epoch or window.", at_least=1
    )
    keep: int = setting(2, "Checkpoints that are kept; older ones are deleted.", at_least=1)
    log_every: int = setting(10, "Steps between lines of the log.", at_least=1)
    log_loads: bool = setting(False, "Also log the loads of all ranks, before and after balancing.")
    tensorboard: bool = setting(False, "Write scalars for TensorBoard to OUT/tensorboard.")
    track_attention: int | None = setting(
        None, "Time each attention layer in 10 steps of this run, from this one on.", at_least=0
    )
    profile: str | None = setting(
        None,
        "START:STOP. Profile these steps of this run, counted from 0, on rank 0: a Chrome trace and, on GPUs, a memory "
        "snapshot in OUT/profile. Default: none.",
    )
    stall_seconds: float = setting(300.0, "Print all stacks if a step takes this long.", at_least=1)
    min_free_gib: float = setting(
        2.0, "GPUs: release the cache of PyTorch's allocator if less than this is free, in GiB.", at_least=0
    )
    max_unallocated: float = setting(
        0.5, "GPUs: release it if more than this share of the device is reserved but unallocated.", at_least=0
    )

    def __post_init__(self) -> None:
        settings = {name: getattr(self, name) for name in FIELDS}
        check_settings(settings)
        if self.hidden % self.heads:
            raise ConfigError(f"hidden must be a multiple of heads, got hidden={self.hidden} and heads={self.heads}")
        if self.max_unallocated > 1:
            raise ConfigError(f"max_unallocated must be at most 1, got {self.max_unallocated}")
        if self.profile is not None:
            _parse_window(self.profile)
        if self.dropout >= 1:
            raise ConfigError(f"dropout must be below 1, got {self.dropout}")
        if self.heads % self.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel = {self.tensor_parallel} cannot divide heads = {self.heads}; choose a divisor"
            )
        check_use(settings, [name for name, value in settings.items() if value != FIELDS[name].default])

    def check_that_apply(self, given: Iterable[str]) -> None:
        """Check that settings that were given, maybe with their defaults, apply to the others.

        Raises:
            ConfigError: one does not, so that it would be ignored.
        """
        check_use({name: getattr(self, name) for name in FIELDS}, given)

    def uses_bf16(self, device_type: str) -> bool:
        """Return whether layers compute in bfloat16 on a type of device."""
        return self.precision == "bf16" or (self.precision == "auto" and device_type == "cuda")

    @property
    def num_candidates(self) -> int:
        """The most targets of a sample of ranking; 0: its whole history."""
        return self.max_num_candidates or (0 if self.time_windows is None else _CANDIDATES_IN_WINDOWS)

    @property
    def profile_window(self) -> tuple[int, int] | None:
        """The steps to profile, as (start, stop)."""
        return None if self.profile is None else _parse_window(self.profile)

    def kept(self) -> dict[str, Any]:
        """Return the settings that a job must keep when it resumes."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.metadata["kept"]}


FIELDS = {entry.name: entry for entry in dataclasses.fields(TrainConfig)}


def _parse_window(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"profile must be START:STOP, steps from 0 on, such as 100:110, got {text!r}")
    return int(found[1]), int(found[2])


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(name: str, values: tuple[Any, ...]) -> str:
    """Return a setting and its values as on a command line."""
    if values == (None,):
        return f"a job {'with' if isinstance(values, AllBut) else 'without'} {_option(name)}"
    return f"{_option(name)} {'other than ' if isinstance(values, AllBut) else ''}{' or '.join(map(str, values))}"


class UnusedError(ConfigError):
    """A setting does not apply to another one."""


def check_use(
    settings: Mapping[str, Any], given: Iterable[str], in_file: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that settings that were given apply to the others; `in_file` has texts for those that a file gave."""
    for name in given:
        if (other := _excluded_by(name, settings)) is not None:
            subject = in_file.get(name, _option(name))
            applies_to = " or ".join(_shown(*one) for one in FIELDS[name].metadata["applies_to"].items())
            excluding = in_file.get(other, _shown(other, (settings[other],)))
            raise UnusedError(f"{subject} applies to {applies_to}, not to {excluding}; leave it out")


def _excluded_by(name: str, settings: Mapping[str, Any]) -> str | None:
    """Return a setting with whose value this one does not apply; None if it applies."""
    excluding = None
    for other, values in FIELDS[name].metadata["applies_to"].items():
        found = _excluded_by(other, settings) or (None if settings[other] in values else other)
        if found is None:
            return None
        excluding = excluding or found
    return excluding


def types_of_settings() -> dict[str, Any]:
    """Return the type of each setting by name."""
    return get_type_hints(TrainConfig)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check the type and the range of each setting."""
    for name, kind in types_of_settings().items():
        if name in settings:
            _check_value(name, settings[name], kind, FIELDS[name].metadata)


def _check_value(name: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> None:
    allowed = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    # `true` is no number, but a whole number is one.
    is_right = type(value) in allowed or (float in allowed and type(value) is int)
    if not is_right:
        wanted = " or ".join(one.__name__ for one in allowed if one is not NoneType)
        raise ConfigError(f"{name} must be of type {wanted}, got {value!r}")
    if limits["choices"] and value not in limits["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(limits['choices'])}, got {value!r}")
    # Not `value < at_least`, which is false for NaN.
    if limits["at_least"] is not None and value is not None and not value >= limits["at_least"]:
        raise ConfigError(f"{name} must be at least {limits['at_least']}, got {value!r}")
