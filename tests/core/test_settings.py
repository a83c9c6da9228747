"""Every option of every public record is checked against its annotation, at one place."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from evenrank import dataloader, preprocess
from evenrank.core.errors import ConfigError
from evenrank.core.rules import (
    PER_RANK,
    AllBut,
    AppliesTo,
    Bounds,
    Count,
    Needs,
    NonNegative,
    OneOf,
    Positive,
    Valid,
    converted,
    declared_rules,
    fault_finder,
    without_rules,
)
from evenrank.core.settings import Settings, help_texts, shared_options
from evenrank.dataloader import balance
from evenrank.datasets.distributions import ClippedZipf, Lognormal, Normal, Uniform, Zipf

LAYERS: dict[str, Any] = {"interleave_actions": True, "hidden": 8, "heads": 1, "head_dim": 8, "layers": 1}
LINEAR = balance.LinearCost(interleave_actions=False)
FIT: dict[str, Any] = {"linear": 1, "quadratic": 1, "fraction_bits": 1, "seconds_per_step": 0.5, "steps": 9, "r2": 0.9}
# With the options that have no default.
RECORDS: dict[Any, dict[str, Any]] = {
    dataloader.LoaderConfig: {"batch_size": 1},
    dataloader.StreamConfig: {},
    dataloader.Targets: {},
    dataloader.TimeWindows: {"every": "1d"},
    dataloader.Pools: {"values": (1,)},
    dataloader.StochasticLength: {"alpha": 1.5},
    dataloader.Cross: {"of": ("user_id",), "size": 8},
    dataloader.Mixture: {"weights": {"a": 1.0}},
    dataloader.Negatives: {"count": 1},
    dataloader.RandomData: {},
    dataloader.RandomFeature: {"values": Uniform(), "lengths": Uniform(), "max_length": 1},
    balance.BalanceConfig: {"cost": LINEAR},
    balance.HSTUCost: LAYERS,
    balance.SelfAttentionCost: LAYERS | {"ffn_multiplier": 4},
    balance.MeasuredCost: FIT | {"interleave_actions": True},
    balance.PaddedCost: {"row": LINEAR},
    **{each: {} for each in (Uniform, Normal, Lognormal, Zipf, ClippedZipf)},
    **{each: {} for each in (preprocess.Filters, preprocess.Drift, preprocess.SyntheticConfig)},
    preprocess.RequestRule: {"seconds": 1.0},
    preprocess.PreprocessConfig: {"dataset": "ml-1m", "out": "out"},
    preprocess.TabularConfig: {"events": (Path("a"),)} | {f"{of}_column": of for of in ("user", "item", "timestamp")},
}
WRONG: dict[Any, list[Any]] = {bool: ["False", 0, 1.0], int: ["1", 0.5, True], float: ["1", True], str: [1, b"a"]}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_an_option_of_another_type_is_an_error_of_one_line(record: Any) -> None:
    def make(**options: Any) -> None:
        made = record(**RECORDS[record] | options)
        if record is balance.BalanceConfig:  # checked where it is used, so that all ranks learn of a mistake
            made.check(exchanges=True)

    make()
    for field in dataclasses.fields(record):
        # Whether an object that is no distribution can draw is not known.
        anything = [] if "Distribution" in str(field.type) else [object()]
        for wrong in [*anything, *WRONG.get(without_rules(field.type), [])]:
            with pytest.raises(ConfigError, match=rf"\b{field.name} must be ") as raised:
                make(**{field.name: wrong})
            assert "\n" not in str(raised.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(Settings):
    name: Annotated[str, OneOf(("thread", "process"))] = "thread"
    """How it runs."""
    share: Annotated[float, Bounds(at_least=0, below=1)] = 0.5
    window: Count | None = None
    stride: Annotated[Count | None, Needs("window")] = None
    port: Annotated[int, AppliesTo(name=("process",))] = 0
    log: Annotated[bool, AppliesTo(name=AllBut(("thread",))), PER_RANK] = False
    weights: Mapping[str, Positive] = dataclasses.field(default_factory=dict)


def test_rules_that_are_kept_and_help_are_those_of_the_declaration() -> None:
    assert Options(name="process", port=80, log=True, window=3, stride=2).stride == 2
    assert shared_options(Options(), "any").keys() == {"name", "share", "window", "stride", "port", "weights"}
    assert help_texts(Options) == {"name": "How it runs."}
    limits = Bounds(above=-math.inf, below=1 << 40), Bounds(at_least=-(1 << 63))
    assert [str(limit) for limit in limits] == ["below 2^40", "at least -2^63"]


TWO, ONE = Valid(lambda value: len(value) == 2, "two of them"), Bounds(at_least=1)
POSITIVE = Bounds(above=0)


@pytest.mark.parametrize(
    ("kind", "value", "fault"),
    [
        (int, True, (None, True, "")),
        (float, np.float64(3), None),
        (Literal[1, "a"], "a", None),
        (Literal[1, "a"], True, (None, True, "")),
        (Count | None, None, None),
        (Count | None, 0, (ONE, 0, "")),
        (Annotated[Count | None, TWO], None, None),
        (tuple[Count, ...], (1, 0), (ONE, 0, "")),
        (tuple[Count, str], (1, 1), (None, 1, "")),
        (tuple[int, int], (1, 2, 3), (None, (1, 2, 3), "")),
        (Sequence[Count], [2, 1], None),
        (Annotated[Sequence[NonNegative], TWO], [0], (TWO, [0], "")),
        (Mapping[str, Count], {"a": 1, "b": 0}, (ONE, 0, "['b']")),
        (Mapping[str, Count], {1: 1}, (None, 1, "[1]")),
        (Annotated[float, POSITIVE], math.nan, (POSITIVE, math.nan, "")),
    ],
)
def test_a_fault_is_the_rule_that_is_broken_with_the_part_that_breaks_it(kind: Any, value: Any, fault: Any) -> None:
    assert fault_finder(kind)(value) == fault


def test_rules_are_found_in_all_parts_of_a_type_and_values_of_files_get_its_type() -> None:
    kind = Annotated[Mapping[str, tuple[Count, ...]] | None, TWO]
    assert (list(declared_rules(kind)), without_rules(kind)) == ([TWO, ONE], Mapping[str, tuple[int, ...]] | None)
    assert converted([1, 0], tuple[Count, ...]) == (1, 0)  # which is checked later
    assert converted(["a"], tuple[int, ...]) == ["a"]
    assert converted([1], Sequence[int]) == [1]
    assert (converted(1.5, timedelta), converted("x", timedelta)) == (timedelta(seconds=1.5), "x")
