"""States of everything that keeps a position: through the formats of checkpoints, and damaged in any way."""

import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import RankError, StateError
from evenrank.dataloader import (
    ElasticLoader,
    ElasticSampler,
    LoaderConfig,
    Mixture,
    RandomBatches,
    RandomData,
    StreamConfig,
    TimeWindows,
    build_loader,
    build_stream_loader,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.state.checks import decode, encode
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.own_samples import COLLATE, nodes_over
from tests.dataloader.resuming import through_json, through_torch
from tests.datasets.crafted import copy_dataset
from tests.datasets.logs import end_log

CONFIG = LoaderConfig(batch_size=32)
OF_WINDOWS = LoaderConfig(batch_size=8, order=TimeWindows(every="1w"), max_num_candidates=1)
SAMPLES: Any = [{"item_id": [index] * (index % 7), "sample_ids": index} for index in range(100)]


def _close(*loaders: Any) -> None:
    for loader in loaders:
        if isinstance(loader, Balancer):
            loader.close()


RANK: dict[str, Any] = {"rank": 0, "world_size": 1}
STREAM = StreamConfig(lanes=5, window_rows=2)
STATEFUL: Any = partial(StatefulDataLoader, SAMPLES, batch_size=8, collate_fn=COLLATE)
BALANCE, WINDOWS = BalanceConfig(cost=item_tokens), BalanceConfig(cost=item_tokens, window=3)


def _log(path: Path) -> Path:
    """Return a log that has ended, with the rows of a dataset."""
    log = path.with_name("log")
    if not log.exists():
        end_log(copy_dataset(path, log) / "train")
    return log


KINDS: dict[str, Callable[[Path], Any]] = {
    "loader": lambda path: build_loader(path, CONFIG, **RANK),
    "mixture": lambda path: build_loader(Mixture(weights={path: 1, str(path): 1}), CONFIG, **RANK),
    "loader with windows": lambda path: build_loader(path, CONFIG, **RANK, balance=WINDOWS),
    "windows of time": lambda path: build_loader(path, OF_WINDOWS, **RANK),
    "elastic": lambda path: ElasticLoader(
        DataLoader(SAMPLES, batch_sampler=ElasticSampler(len(SAMPLES), batch_size=8, **RANK), collate_fn=COLLATE)
    ),
    "stream": lambda path: build_stream_loader(path, CONFIG, STREAM, **RANK),
    "log": lambda path: build_stream_loader(_log(path), LoaderConfig(batch_size=8, order="rows"), **RANK, follow=True),
    "random batches": lambda path: RandomBatches(LoaderConfig(batch_size=8), num_batches=9, **RANK),
    "balanced loader": lambda path: Balancer(build_loader(path, CONFIG, **RANK), BALANCE),
    "balanced stream": lambda path: Balancer(build_stream_loader(path, CONFIG, STREAM, **RANK), BALANCE),
    "balanced StatefulDataLoader": lambda path: Balancer(STATEFUL(), BALANCE),
    "balanced nodes": lambda path: Balancer(nodes_over(SAMPLES, 8), BALANCE),
}


@pytest.mark.parametrize("save_and_load", [through_json, through_torch])
@pytest.mark.parametrize("kind", KINDS)
def test_any_format_resumes_exactly(small_dataset: Path, kind: str, save_and_load: Callable[[Any], Any]) -> None:
    for step in (0, 3):
        loader, resumed = KINDS[kind](small_dataset), KINDS[kind](small_dataset)
        iterator = iter(loader)
        for _ in range(step):
            next(iterator)
        state = loader.state_dict()
        assert save_and_load(state) == state
        resumed.load_state_dict(save_and_load(state))
        assert [ids_of(batch) for batch in resumed] == [ids_of(batch) for batch in iterator]
        _close(loader, resumed)


_JUNK = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 31, 32, 64, 1 << 31, (1 << 31) - 1, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 70]),
    st.sampled_from([10**5000, math.nan, math.inf, 1.0, True, False, None, "", "x\ny", "0", b"x", (), [], [0, 0], {}]),
    st.sampled_from([[1, 2, 3], [0, -1], [1, 0], [0, 5], [3, 0], {"0": [0, 0]}, object()]),
    st.integers(),
    st.text(max_size=3),
).map(copy.deepcopy)


def _places(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all entries of nested mappings and lists."""
    entries = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return [place for key, value in entries for place in ((*path, key), *_places(value, (*path, key)))]


@st.composite
def _damaged(draw: st.DrawFn, state: dict[str, Any]) -> Any:
    """Draw a state in which entries were replaced, removed or added."""
    state = copy.deepcopy(state)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(state)
        if not places:
            return draw(_JUNK)
        *path, key = draw(st.sampled_from(places))
        parent = state
        for step in path:
            parent = parent[step]
        match draw(st.sampled_from(["replace", "replace", "nudge", "remove", "add"])):
            case "remove":
                del parent[key]
            case "add" if isinstance(parent, dict):
                key_to_add: Any = draw(st.one_of(st.text(max_size=2), st.integers()))
                parent[key_to_add] = draw(_JUNK)
            case "nudge" if isinstance(parent[key], str) and parent[key]:
                index = draw(st.integers(0, len(parent[key]) - 1))
                parent[key] = parent[key][:index] + draw(st.characters()) + parent[key][index + 1 :]
            case "nudge" if type(parent[key]) is int:
                parent[key] += draw(st.integers(-3, 3))
            case _:
                parent[key] = draw(_JUNK)
    return state


def _check_message(error: Exception, part: str) -> None:
    message = str(error)
    assert part in message
    assert message.isprintable()
    assert len(message) < 600


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_state_is_refused_or_yields_each_sample_at_most_once(small_dataset: Path, kind: str) -> None:
    whole, loader = KINDS[kind](small_dataset), KINDS[kind](small_dataset)
    samples = {sample for batch in whole for sample in ids_of(batch)}
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    state = loader.state_dict()
    resumed = KINDS[kind](small_dataset)
    fresh = resumed.state_dict()

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(_damaged(state))
    def check(damaged: Any) -> None:
        nonlocal resumed
        try:
            resumed.load_state_dict(damaged)
        except StateError as error:
            _check_message(error, "state")
            return
        try:
            # More steps than there are samples would never end.
            ids = [sample for batch in itertools.islice(resumed, len(samples) + 9) for sample in ids_of(batch)]
        except RankError as error:
            _check_message(error, "state")
            resumed = KINDS[kind](small_dataset)
            return
        assert len(set(ids)) == len(ids)
        assert set(ids) <= samples
        resumed.load_state_dict(fresh)

    check()
    _close(whole, loader, resumed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_one_other_character_never_loads(small_dataset: Path, kind: str) -> None:
    loader = KINDS[kind](small_dataset)
    iterator = iter(loader)
    next(iterator)
    text = json.dumps(loader.state_dict())
    rng = random.Random(0)
    loaded = refused = 0
    for index, before in enumerate(text):
        after = rng.choice([character for character in "0123456789abcXYZ+/={}" if character != before])
        try:
            damaged = json.loads(f"{text[:index]}{after}{text[index + 1 :]}")
        except ValueError:
            continue
        try:
            loader.load_state_dict(damaged)
            loaded += 1
        except StateError as error:
            _check_message(error, "state")
            refused += 1
    assert loaded == 0 < refused
    _close(loader)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": True}, ": epoch must be of type int, got True; load a state that state_dict returned"),
        ({"seed": 1 << 70}, ": seed must be at least -2^63 and below 2^63, got 1180591620717411303424; load a state"),
        ({"position": math.nan}, ": position must be of type int, got nan; load a state"),
        (
            {"position": 10**5000},
            ": position must be at least 0 and below 2^63, got an integer of 16610 bits; load a state",
        ),
        ({"seed": [10**5000]}, ": seed must be of type int, got [an integer of 16610 bits]; load a state"),
        ({"fingerprint": [1]}, ": fingerprint must be of type str, got [1]; load a state"),
        ({"more": 1}, " has the unknown entry 'more'; load a state that state_dict returned"),
        ({"position": 64}, " is damaged: its checksum is not that of its contents; load an inta"),
    ],
)
def test_refused_entry_is_named_with_its_value(small_dataset: Path, change: dict[str, Any], message: str) -> None:
    loader = KINDS["loader"](small_dataset)
    with pytest.raises(StateError) as raised:
        loader.load_state_dict({**loader.state_dict(), **change})
    assert str(raised.value).startswith(f"the state of the loader{message}")


CODES: dict[str, Callable[[Path, LoaderConfig], Any]] = {
    "loader": lambda path, config: build_loader(path, config, **RANK),
    "stream": lambda path, config: build_stream_loader(path, config, STREAM, **RANK),
    "random batches": lambda path, config: RandomBatches(
        config, RandomData(items=Uniform(low=0, high=500)), num_batches=9, **RANK
    ),
}


@pytest.mark.parametrize("kind", CODES)
def test_a_state_is_refused_where_items_have_other_codes(small_dataset: Path, kind: str) -> None:
    """The same items have a code in both tables, so the same rows are samples."""
    codes = [random_codes(501, levels=2, codebook_size=8, seed=seed) for seed in (0, 0, 1)]
    loader, same, other = (CODES[kind](small_dataset, LoaderConfig(batch_size=8, codes=table)) for table in codes)
    next(iter(loader))
    state = loader.state_dict()
    same.load_state_dict(state)
    with pytest.raises(StateError, match=r"codes.* fingerprint|fingerprint .* codes"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, 2.5, None, True, "x", b"y", (1, 2), {3}], 4: {}},
        torch.Generator().get_state(),
        np.random.default_rng(0).bit_generator.state,
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.int64(7),
    ],
)
def test_states_of_anyones_loaders_are_kept_without_pickling(state: Any) -> None:
    assert repr(decode(encode(state))) == repr(state)


def test_no_code_is_run_from_a_state(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    with pytest.raises(StateError, match=r"contains .*, which is not loaded from files by default; if you trust"):
        decode(encode(Malicious()))
    assert not (tmp_path / "ran").exists()
