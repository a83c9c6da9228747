"""Every option of every public record is checked against its annotation, at one place."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from evenrank import dataloader, training
from evenrank.core.errors import ConfigError
from evenrank.core.rules import PER_RANK, AllBut, AppliesTo, Bounds, Count, Needs, OneOf, Positive, without_rules
from evenrank.core.settings import Settings, help_texts, shared_options
from evenrank.dataloader import (
    LoaderConfig,
    Mixture,
    Negatives,
    RandomData,
    RandomFeature,
    StreamConfig,
    Targets,
    TimeWindows,
)
from evenrank.dataloader.balance import BalanceConfig, HSTUCost, LinearCost, MeasuredCost, PaddedCost, SelfAttentionCost
from evenrank.datasets.distributions import ClippedZipf, Lognormal, Normal, Uniform, Zipf
from evenrank.preprocess import Drift, Filters, PreprocessConfig, RequestRule, SyntheticConfig, TabularConfig

LAYERS: dict[str, Any] = {"interleave_actions": True, "hidden": 8, "heads": 1, "head_dim": 8, "layers": 1}
LINEAR = LinearCost(interleave_actions=False)
FIT: dict[str, Any] = {"linear": 1, "quadratic": 1, "fraction_bits": 1, "seconds_per_step": 0.5, "steps": 9, "r2": 0.9}
LOG: dict[str, Any] = {"events": (Path("a"),), "user_column": "u", "item_column": "i", "timestamp_column": "t"}
# With the options that have no default.
RECORDS: dict[Any, dict[str, Any]] = {
    LoaderConfig: {"batch_size": 1},
    StreamConfig: {},
    Targets: {},
    TimeWindows: {"every": "1d"},
    Mixture: {"weights": {"a": 1.0}},
    Negatives: {"count": 1},
    RandomData: {},
    RandomFeature: {"values": Uniform(), "lengths": Uniform(), "max_length": 1},
    BalanceConfig: {"cost": LINEAR},
    HSTUCost: LAYERS,
    SelfAttentionCost: LAYERS | {"ffn_multiplier": 4},
    MeasuredCost: FIT | {"interleave_actions": True},
    PaddedCost: {"row": LINEAR},
    **{each: {} for each in (Uniform, Normal, Lognormal, Zipf, ClippedZipf, Filters, Drift, SyntheticConfig)},
    RequestRule: {"seconds": 1.0},
    PreprocessConfig: {"dataset": "ml-1m", "out": "out"},
    TabularConfig: LOG,
}
WRONG: dict[Any, list[Any]] = {bool: ["False", 0, 1.0], int: ["1", 0.5, True], float: ["1", True], str: [1, b"a"]}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_an_option_of_another_type_is_an_error_of_one_line(record: Any) -> None:
    def make(**options: Any) -> None:
        made = record(**RECORDS[record] | options)
        if record is BalanceConfig:  # which is checked where it is used, so that all ranks learn of a mistake
            made.check(exchanges=True)

    make()
    for field in dataclasses.fields(record):
        # Whether an object that is no distribution can draw is not known.
        anything = [] if "Distribution" in str(field.type) else [object()]
        for wrong in [*anything, *WRONG.get(without_rules(field.type), [])]:
            with pytest.raises(ConfigError, match=rf"\b{field.name} must be ") as raised:
                make(**{field.name: wrong})
            assert "\n" not in str(raised.value)


ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}
CONFIG = LoaderConfig(batch_size=1)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda x: dataloader.build_loader("x", CONFIG, rank=x, world_size=2), "rank must be of type int"),
        (lambda x: dataloader.ElasticSampler(8, batch_size=1, shuffle=x, **ALONE), "shuffle must be of type bool"),
        (lambda x: dataloader.jagged(max_length=x), "max_length must be of type int | None"),
        (lambda x: dataloader.Replay([], speed=x), "speed must be of type float"),
        (lambda x: training.StepTimer(x), "writers must be of type Callable["),
        (lambda x: training.MemoryWatch("cuda", min_free_gib=x), "min_free_gib must be of type float"),
        (lambda x: training.RankingMetrics(x), "ks must be "),
    ],
)
def test_arguments_are_checked_as_records_are(call: Callable[[Any], Any], line: str) -> None:
    for wrong in ("False", True if "bool" not in line else 1):
        with pytest.raises(ConfigError) as raised:
            call(wrong)
        assert line in str(raised.value)


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


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"name": "tread"}, "name must be one of thread, process, got 'tread'; did you mean thread?"),
        ({"share": 1}, "share must be at least 0 and below 1, got 1"),
        ({"share": math.nan}, "share must be at least 0 and below 1, got nan"),
        ({"stride": 2}, "stride=2 has no effect without window; give both, or leave it out"),
        ({"port": 80}, "port=80 applies to name='process', not to name='thread'; leave it out"),
        ({"log": True}, "log=True applies to options other than name='thread', not to name='thread'; leave it out"),
        ({"weights": {"a": math.inf}}, "weights['a'] must be above 0 and finite, got inf"),
        ({"window": -(10**50)}, "window must be at least 1, got an integer of 167 bits"),
    ],
)
def test_a_broken_rule_is_an_error_with_the_record_the_option_and_its_value(options: Any, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Options(**options)
    assert str(raised.value) == f"Options: {line}"


def test_rules_that_are_kept_and_help_are_those_of_the_declaration() -> None:
    assert Options(name="process", port=80, log=True, window=3, stride=2).stride == 2
    assert shared_options(Options(), "any").keys() == {"name", "share", "window", "stride", "port", "weights"}
    assert help_texts(Options) == {"name": "How it runs."}
    assert str(Bounds(above=-math.inf, below=1 << 40)) == "below 2^40"
    assert str(Bounds(at_least=-(1 << 63))) == "at least -2^63"
