"""Laws of positions, for all that hands out batches: its state says which batch comes next.

At every point: before the first batch and after any other, in each pass over an epoch, and as soon as the position was
moved, whoever moved it and whoever saves it.
"""

import copy
import functools
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import RankError, StateError
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.batch_helpers import ids_of, nodes_over, through_json
from tests.laws.data import OWN, OWN_COLLATE
from tests.laws.kinds import BALANCED, KINDS, balance_of, cells, has, make, moved_by
from tests.laws.making import Job

Epochs = list[list[list[int]]]

# Which have one state per rank, and only behind a Balancer one after a batch.
OF_OTHERS: dict[str, Callable[[], Any]] = {
    "StatefulDataLoader": lambda: StatefulDataLoader(OWN, batch_size=12, collate_fn=OWN_COLLATE),
    "nodes": lambda: nodes_over(OWN, 12),
}
OF_WAYS = {
    "Balancer, window": BalanceConfig(cost=item_tokens, lookahead=2, window=3),
    "Balancer, packed": BalanceConfig(cost=item_tokens, lookahead=3, pack=True, max_tokens_per_rank=90),
}
SIZES = {"requests": 30, "windows of time": 15}  # of batches, so that epochs have a few


class Case(NamedTuple):
    outer: Any
    """What is iterated over, and saved."""
    inner: Any
    """What has the position."""


def _make(data: Path, kind: str, way: str = "plain", is_balanced: bool = False, batch_size: int | None = None) -> Case:
    job = Job(kind=kind, way=way, batch_size=batch_size or SIZES.get(kind, 10))
    if way in BALANCED:
        loader = OF_OTHERS[kind]() if kind in OF_OTHERS else KINDS[kind].make(data, job, None)
        return Case(Balancer(loader, OF_WAYS[way]), moved_by(loader))
    if not is_balanced:
        loader = make(data, job)
        return Case(loader, moved_by(loader))
    if kind in OF_OTHERS:
        loader = OF_OTHERS[kind]()
    else:
        loader = KINDS[kind].make(data, replace(job, way="Balancer"), balance_of(job))
    return Case(Balancer(loader, BalanceConfig(cost=item_tokens, lookahead=3)), moved_by(loader))


def _iterate(loader: Any) -> list[list[int]]:
    return [ids_of(batch) for batch in loader]


def _take(iterator: Iterator[Any], count: int) -> list[list[int]]:
    return [ids_of(batch) for batch in itertools.islice(iterator, count)]


_EPOCHS: dict[tuple[str, str], Epochs] = {}


def _epochs(data: Path, kind: str, way: str) -> Epochs:
    """Return the batches of each epoch of a loader that is never stopped."""
    if (kind, way) not in _EPOCHS:
        is_made = kind in KINDS or way in BALANCED
        loader = _make(data, kind, way).outer if is_made else nodes.Loader(nodes_over(OWN, 12))
        _EPOCHS[kind, way] = [_iterate(loader) for _ in range(4 if has(kind, "epochs") else 1)]
        assert all(len(epoch) > 1 for epoch in _EPOCHS[kind, way])
    return _EPOCHS[kind, way]


def _check_comes_next(loader: Any, epochs: Epochs, epoch: int, step: int = 0) -> None:
    """Iterate over a loader, twice if there are several epochs, and compare."""
    if step == len(epochs[epoch]):
        epoch, step = epoch + 1, 0
    following = [*([] if epoch == len(epochs) else [epochs[epoch][step:]]), *epochs[epoch + 1 :]][:2]
    assert [_iterate(loader) for _ in following] == following


OF_GROUPS = [("shuffle", "packed"), ("shuffle", "window"), ("windows of time", "window"), ("elastic", "window")]
OWN_CASES = [(*cell, is_balanced) for cell in (*cells("plain"), *OF_GROUPS) for is_balanced in (False, True)]
OF_SEVERAL = [(kind, way, True) for kind in (*KINDS, *OF_OTHERS) for way in OF_WAYS if has(kind, way)]
CASES = OWN_CASES + [(kind, "plain", True) for kind in OF_OTHERS] + OF_SEVERAL
NODES = [case for case in CASES if has(case[0], "epochs") and (case[0] != "elastic" or case[2])]


@pytest.mark.parametrize(("kind", "way", "is_balanced"), CASES)
def test_a_state_of_any_point_of_any_pass_continues_there(data: Path, kind: str, way: str, is_balanced: bool) -> None:
    epochs = _epochs(data, kind, way)
    loader, resumed = (_make(data, kind, way, is_balanced).outer for _ in range(2))
    begin = loader.state_dict()
    for epoch in range(min(2, len(epochs))):
        for step in range(len(epochs[epoch]) + 1) if epoch == 0 else (0, 1, len(epochs[epoch])):
            loader.load_state_dict(begin)
            assert [_iterate(loader) for _ in range(epoch)] == epochs[:epoch]
            iterator = iter(loader)
            assert _take(iterator, step) == epochs[epoch][:step]
            state = through_json(loader.state_dict())
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            _check_comes_next(resumed, epochs, epoch, step)
            list(iterator)
            assert loader.state_dict()["position"] >= state["position"]
            loader.load_state_dict(state)  # as in a job that goes back
            _check_comes_next(loader, epochs, epoch, step)


@pytest.mark.parametrize(("kind", "way", "is_balanced"), NODES)
def test_a_node_that_is_reset_has_the_state_of_the_next_epoch(
    data: Path, kind: str, way: str, is_balanced: bool
) -> None:
    epochs = _epochs(data, kind, way)

    def check_begins(node: Any, epoch: int) -> None:
        for _ in range(2):  # it begins once
            node.reset()
            resumed = _make(data, kind, way, is_balanced).outer
            resumed.reset(node.state_dict())
            assert ids_of(next(resumed)) == epochs[epoch][0]
            resumed.reset()
            resumed.reset(node.state_dict())
            resumed.reset()
            assert ids_of(next(resumed)) == epochs[epoch][0]  # nothing of which was left out
        assert ids_of(next(node)) == epochs[epoch][0]

    node = _make(data, kind, way, is_balanced).outer
    check_begins(node, 0)
    state = node.state_dict()
    check_begins(node, 1)
    node.reset(state)
    check_begins(node, 1)  # and not what is left of the first one
    node.load_state_dict(state)  # as of an iterable, of which the next iteration is the rest
    node.reset()
    assert _take(node, 99) == epochs[0][1:]


def _moves(kind: str, inner: Any, states: list[Any]) -> list[tuple[str, Any, int, int]]:
    """Return all ways to move a loader: method, argument, and the epoch and step that come then."""
    moves = [("load_state_dict", state, 0, step) for step, state in enumerate(states)]
    names = ["begin_at"] * has(kind, "epochs") + ["set_epoch"] * hasattr(inner, "set_epoch")
    moves += [(name, epoch, epoch, 0) for name in names for epoch in (0, 2)]
    return [*moves, ("begin_after", states[1], 1, 0) if has(kind, "epochs") else ("begin_after", states[1], 0, 1)]


@pytest.mark.parametrize(("kind", "way", "is_balanced"), OWN_CASES)
def test_a_position_that_is_moved_is_saved_at_once(data: Path, kind: str, way: str, is_balanced: bool) -> None:
    epochs = _epochs(data, kind, way)
    loader, inner = _make(data, kind, way)
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    (loader, inner), resumed = (_make(data, kind, way, is_balanced) for _ in range(2))
    for name, argument, epoch, step in _moves(kind, inner, states):
        for taken in (0, 2):
            inner.load_state_dict(states[0])
            iterator = iter(loader)
            _take(iterator, taken)
            getattr(inner, name)(argument)
            resumed.outer.load_state_dict(loader.state_dict())
            _check_comes_next(resumed.outer, epochs, epoch, step)
            _check_comes_next(loader, epochs, epoch, step)


@pytest.mark.parametrize("kind", ["windows of time", "elastic", "shuffle"])
def test_a_second_pass_over_an_epoch_that_was_resumed_in_another_shape_is_whole(data: Path, kind: str) -> None:
    (stopped, _), (resumed, inner) = (_make(data, kind, "window", batch_size=size) for size in (5, 3))
    last = _make(data, kind, batch_size=7).outer
    samples = Counter(itertools.chain(*_iterate(last)))
    for _ in stopped:
        state = stopped.state_dict()
        resumed.load_state_dict(state)
        next(iter(resumed))
        inner.begin_at(0)
        trained = Counter[int]()
        for batch in resumed:
            trained.update(ids_of(batch))
            last.load_state_dict(resumed.state_dict())
            if last.epoch == 0:
                assert trained + Counter(itertools.chain(*_iterate(last))) == samples
        assert trained == samples


LEFT = [(kind, *way) for kind in ("shuffle", "elastic") for way in (("alone", False), ("plain", True))]


@pytest.mark.parametrize(("kind", "way", "is_balanced"), [*LEFT, ("StatefulDataLoader", "plain", True)])
def test_an_epoch_that_is_left_is_named_when_the_next_begins(
    data: Path, caplog: pytest.LogCaptureFixture, kind: str, way: str, is_balanced: bool
) -> None:
    loader = _make(data, kind, way, is_balanced).outer
    for _ in range(2):  # also up to the last batch alone, as trainers do that know the length
        list(loader)
        _take(iter(loader), len(loader))
    _take(iter(loader), 2)
    loader.load_state_dict(loader.state_dict())
    list(loader)
    *_, last = itertools.islice(loader, len(loader) - 1)
    assert [message for message in caplog.messages if "was left" in message] == []
    next(iter(loader))
    (message,) = (message for message in caplog.messages if "was left" in message)
    assert message.startswith(f"epoch {last.epoch} was left at position {last.position},")


def check_refused(state: Any, *loads: Callable[[Any], Any]) -> None:
    """Check that a state with any other character is refused in one line, wherever it goes."""
    text, rng, num_refused = json.dumps(state), random.Random(0), 0
    for index, before in enumerate(text):
        after = rng.choice([character for character in "0123456789abcXYZ+/={}" if character != before])
        try:
            damaged = json.loads(f"{text[:index]}{after}{text[index + 1 :]}")
        except ValueError:
            continue
        for load in loads:
            with pytest.raises(StateError, match=r"state.*; ") as raised:
                load(damaged)
            assert str(raised.value).isprintable()
        num_refused += 1
    assert num_refused > 50


def check_line(text: str) -> None:
    assert "state" in text
    assert text.isprintable()
    assert len(text) < 600


_NUMBERS = [-1, 0, 1, 2, 31, 64, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**5000, math.nan, math.inf, 1.0]
_OTHERS = [True, None, "", "x\ny", "0", b"x", (), [0, 0], {}, [1, 2, 3], [0, -1], [3, 0], {"0": [0, 0]}]
_JUNK = st.one_of(st.sampled_from([*_NUMBERS, *_OTHERS]), st.integers(), st.text(max_size=3)).map(copy.deepcopy)


def _places(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all entries of nested mappings and lists."""
    entries = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return [place for key, value in entries for place in ((*path, key), *_places(value, (*path, key)))]


@st.composite
def _damaged(draw: st.DrawFn, state: dict[str, Any]) -> Any:
    """Draw a state in which entries were replaced, removed or added."""
    state = copy.deepcopy(state)
    for _ in range(draw(st.integers(1, 3))):
        if not (places := _places(state)):
            return draw(_JUNK)
        *path, key = draw(st.sampled_from(places))
        parent = functools.reduce(lambda inner, step: inner[step], path, state)
        change = draw(st.sampled_from(["replace", "nudge", "remove", "add"]))
        if change == "remove":
            del parent[key]
        elif change == "add" and isinstance(parent, dict):
            parent[draw(st.text(max_size=2))] = draw(_JUNK)
        elif change == "nudge" and type(parent[key]) is int:
            parent[key] += draw(st.integers(-3, 3))
        else:
            parent[key] = draw(_JUNK)
    return state


ONCE = [(kind, "plain", is_balanced) for kind in KINDS for is_balanced in (False, kind in ("stream", "elastic"))]


@pytest.mark.parametrize(
    ("kind", "way", "is_balanced"), [*dict.fromkeys(ONCE), *((k, "plain", True) for k in OF_OTHERS)]
)
def test_a_damaged_state_is_refused_or_yields_each_sample_at_most_once(
    data: Path, kind: str, way: str, is_balanced: bool
) -> None:
    samples = {*itertools.chain(*_epochs(data, kind, way)[0])}
    loader, resumed = (_make(data, kind, way, is_balanced).outer for _ in range(2))
    fresh = resumed.state_dict()
    next(iter(loader))
    state = loader.state_dict()
    check_refused(state, resumed.load_state_dict, *([resumed.begin_after] if hasattr(resumed, "begin_after") else []))

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(_damaged(state))
    def check(damaged: Any) -> None:
        nonlocal resumed
        try:
            resumed.load_state_dict(damaged)
            # More steps than there are samples would never end.
            ids = [*itertools.chain(*_take(iter(resumed), len(samples) + 9))]
        except (StateError, RankError) as error:
            check_line(str(error))
            if isinstance(error, RankError):
                resumed = _make(data, kind, way, is_balanced).outer
            return
        assert len({*ids}) == len(ids)
        assert {*ids} <= samples
        resumed.load_state_dict(fresh)

    check()
