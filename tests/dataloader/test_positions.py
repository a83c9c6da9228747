"""Laws of positions, for all that hands out batches: its state says which batch comes next.

At every point: before the first batch and after any other, in each pass over an epoch, and as soon as the position was
moved, whoever moved it and whoever saves it.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.core.errors import ConfigError, StateError
from evenrank.dataloader import (
    ElasticLoader,
    ElasticSampler,
    LoaderConfig,
    Mixture,
    RandomBatches,
    Requests,
    StreamConfig,
    TimeWindows,
    build_loader,
    build_stream_loader,
    merge_stream_states,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.datasets import FolderLog, read_manifest
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.own_samples import COLLATE, nodes_over
from tests.dataloader.resuming import through_json
from tests.datasets.crafted import copy_dataset
from tests.datasets.logs import end_log

Epochs = list[list[list[int]]]

SAMPLES: Any = [{"item_id": [index] * (index * 5 % 9), "sample_ids": index} for index in range(50)]
LENGTHS = {"item_id": np.array([len(sample["item_id"]) for sample in SAMPLES])}
STEPS = {
    "alone": None,
    "in groups": BalanceConfig(cost=item_tokens, window=3),
    "packed": BalanceConfig(cost=item_tokens, pack=True, max_tokens_per_rank=400),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset with requests, and with its train split as a log."""
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    from evenrank.preprocess import PreprocessConfig, RequestRule, SyntheticConfig, preprocess

    out = tmp_path_factory.mktemp("positions") / "data"
    synthetic = SyntheticConfig(num_users=50)
    rule = RequestRule(seconds=7 * 86400)
    preprocess(PreprocessConfig(dataset="synthetic", out=out, seed=1, synthetic=synthetic, split="none", requests=rule))
    end_log(copy_dataset(out, out.with_name("log")) / "train")
    return out


def _stored(data: Any, steps: str = "alone", batch_size: int = 10, **options: Any) -> Any:
    config = LoaderConfig(batch_size=batch_size, max_history_length=20, **options)
    return build_loader(data, config, rank=0, world_size=1, balance=STEPS[steps])


def _stream(data: Path, rank: int = 0, world_size: int = 1) -> Any:
    config, stream = LoaderConfig(batch_size=10), StreamConfig(num_shards=5, buffer_rows=16, open_shards=2)
    return build_stream_loader(data, config, stream, rank=rank, world_size=world_size)


def _log(source: Any) -> Any:
    config = LoaderConfig(batch_size=10, order="rows")
    return build_stream_loader(source, config, rank=0, world_size=1, follow=True)


def _windows(data: Path, steps: str = "alone", batch_size: int = 9) -> Any:
    order = TimeWindows(every="1w", start="2020-09-17")
    return _stored(data, steps, batch_size, order=order, max_num_candidates=40)


def _elastic(_: Path, steps: str = "alone", batch_size: int = 12, kind: Any = DataLoader, **workers: int) -> Any:
    options: dict[str, Any] = {} if steps == "alone" else {"lengths": LENGTHS, "balance": STEPS[steps]}
    sampler = ElasticSampler(len(SAMPLES), batch_size=batch_size, rank=0, world_size=1, **options)
    return kind(SAMPLES, batch_sampler=sampler, collate_fn=COLLATE, **workers)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "stored": _stored,
    "rows": lambda data: _stored(data, order="rows"),
    "steps in groups": lambda data: _stored(data, "in groups", 7),
    "packed steps": lambda data: _stored(data, "packed"),
    "mixture": lambda data: _stored(Mixture(weights={data: 1, str(data): 2})),
    "requests": lambda data: _stored(data, order=Requests(), max_num_candidates=2, batch_size=15),
    "windows of time": _windows,
    "windows of time, steps in groups": lambda data: _windows(data, "in groups", 7),
    "stream": _stream,
    "log": lambda data: _log(data.with_name("log")),
    "random": lambda _: RandomBatches(LoaderConfig(batch_size=4), num_batches=5),
    "elastic": _elastic,
    "elastic, steps in groups": lambda data: _elastic(data, "in groups", 9),
}
# Which have one state per rank, and only behind a Balancer one after a batch.
OF_OTHERS: dict[str, Callable[[Path], Any]] = {
    "StatefulDataLoader": lambda _: StatefulDataLoader(SAMPLES, batch_size=12, collate_fn=COLLATE),
    "nodes": lambda _: nodes_over(SAMPLES, 12),
}


class Case(NamedTuple):
    outer: Any
    """What is iterated over, and saved."""
    inner: Any
    """What has the position."""


def _make(kind: str, data: Path, *, is_balanced: bool = False) -> Case:
    loader = (LOADERS | OF_OTHERS)[kind](data)
    sampler = getattr(loader, "batch_sampler", None)
    is_elastic = isinstance(sampler, ElasticSampler)
    if is_balanced:
        outer: Any = Balancer(loader, BalanceConfig(cost=item_tokens, lookahead=3))
    else:
        outer = ElasticLoader(loader) if is_elastic else loader
    return Case(outer, sampler if is_elastic else loader)


def _iterate(loader: Any) -> list[list[int]]:
    return [ids_of(batch) for batch in loader]


def _take(iterator: Iterator[Any], count: int) -> list[list[int]]:
    return [ids_of(batch) for batch in itertools.islice(iterator, count)]


_EPOCHS: dict[str, Epochs] = {}


def _epochs(kind: str, data: Path) -> Epochs:
    """Return the batches of each epoch of a loader that is never stopped."""
    if kind not in _EPOCHS:
        loader = _make(kind, data).outer
        loader = nodes.Loader(loader) if kind == "nodes" else loader
        _EPOCHS[kind] = [_iterate(loader) for _ in range(1 if kind == "log" else 4)]
        assert all(len(epoch) > 1 for epoch in _EPOCHS[kind])
    return _EPOCHS[kind]


def _check_comes_next(loader: Any, epochs: Epochs, epoch: int, step: int = 0) -> None:
    """Iterate over a loader, twice if there are several epochs, and compare."""
    if step == len(epochs[epoch]):
        epoch, step = epoch + 1, 0
    following = [*([] if epoch == len(epochs) else [epochs[epoch][step:]]), *epochs[epoch + 1 :]][:2]
    assert [_iterate(loader) for _ in following] == following


CASES = [(kind, is_balanced) for kind in LOADERS for is_balanced in (False, True)]
CASES_OF_OTHERS = [(kind, True) for kind in OF_OTHERS]
NODES = [case for case in CASES if case[0] != "log" and (case[1] or not case[0].startswith("elastic"))]


@pytest.mark.parametrize(("kind", "is_balanced"), CASES + CASES_OF_OTHERS)
def test_a_state_of_any_point_of_any_pass_continues_there(data: Path, kind: str, is_balanced: bool) -> None:
    epochs = _epochs(kind, data)
    loader, resumed = (_make(kind, data, is_balanced=is_balanced).outer for _ in range(2))
    begin = loader.state_dict()
    for epoch in range(min(2, len(epochs))):
        for step in range(len(epochs[epoch]) + 1):
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


@pytest.mark.parametrize(("kind", "is_balanced"), NODES + CASES_OF_OTHERS)
def test_a_node_that_is_reset_has_the_state_of_the_next_epoch(data: Path, kind: str, is_balanced: bool) -> None:
    epochs = _epochs(kind, data)

    def check_begins(node: Any, epoch: int) -> None:
        for _ in range(2):  # it begins once
            node.reset()
            resumed = _make(kind, data, is_balanced=is_balanced).outer
            resumed.reset(node.state_dict())
            assert ids_of(next(resumed)) == epochs[epoch][0]
            resumed.reset()
            resumed.reset(node.state_dict())
            resumed.reset()
            assert ids_of(next(resumed)) == epochs[epoch][0]  # nothing of which was left out
        assert ids_of(next(node)) == epochs[epoch][0]

    node = _make(kind, data, is_balanced=is_balanced).outer
    check_begins(node, 0)
    state = node.state_dict()
    check_begins(node, 1)
    node.reset(state)
    check_begins(node, 1)  # and not what is left of the first one
    node.load_state_dict(state)  # as of an iterable, of which the next iteration is the rest
    node.reset()
    assert _take(node, 99) == epochs[0][1:]


def _moves(inner: Any, states: list[Any]) -> list[tuple[str, Any, int, int]]:
    """Return all ways to move a loader: method, argument, and the epoch and step that come then."""
    moves = [("load_state_dict", state, 0, step) for step, state in enumerate(states)]
    moves += [(name, epoch, epoch, 0) for name in ("begin_at", "set_epoch") for epoch in (0, 2)]
    return [move for move in (*moves, ("begin_after", states[1], 1, 0)) if hasattr(inner, move[0])]


@pytest.mark.parametrize(("kind", "is_balanced"), CASES)
def test_a_position_that_is_moved_is_saved_at_once(data: Path, kind: str, is_balanced: bool) -> None:
    epochs = _epochs(kind, data)
    loader, inner = _make(kind, data)
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    (loader, inner), resumed = (_make(kind, data, is_balanced=is_balanced) for _ in range(2))
    for name, argument, epoch, step in _moves(inner, states):
        for taken in (0, 2):
            inner.load_state_dict(states[0])
            iterator = iter(loader)
            _take(iterator, taken)
            getattr(inner, name)(argument)
            resumed.outer.load_state_dict(loader.state_dict())
            _check_comes_next(resumed.outer, epochs, epoch, step)
            _check_comes_next(loader, epochs, epoch, step)


@pytest.mark.parametrize("make", [_windows, _elastic, _stored], ids=["begin_at", "set_epoch", "load_state_dict"])
def test_a_second_pass_over_an_epoch_that_was_resumed_in_another_shape_is_whole(data: Path, make: Any) -> None:
    def case(steps: str, batch_size: int) -> Case:
        loader = make(data, steps, batch_size)
        sampler = getattr(loader, "batch_sampler", None)
        return Case(loader, loader) if sampler is None else Case(ElasticLoader(loader), sampler)

    stopped, (resumed, inner), last = case("in groups", 5).outer, case("in groups", 3), case("alone", 7).outer
    begin = resumed.state_dict()
    samples = Counter(itertools.chain(*_iterate(last)))
    again = getattr(inner, "begin_at", getattr(inner, "set_epoch", lambda _: inner.load_state_dict(begin)))
    for _ in stopped:
        state = stopped.state_dict()
        resumed.load_state_dict(state)
        next(iter(resumed))
        again(0)
        trained = Counter[int]()
        for batch in resumed:
            trained.update(ids_of(batch))
            last.load_state_dict(resumed.state_dict())
            if last.epoch == 0:
                assert trained + Counter(itertools.chain(*_iterate(last))) == samples
        assert trained == samples


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_a_stateful_data_loader_goes_on_after_any_step(data: Path, num_workers: int, every: int) -> None:
    """Exactly there, as with any sampler: nothing is left of an epoch of which it has not seen the end."""

    def make() -> Any:
        return _elastic(data, kind=StatefulDataLoader, num_workers=num_workers, snapshot_every_n_steps=every)

    epochs = _epochs("elastic", data)
    for epoch, step in [(0, 0), (0, 3), (0, 4), (0, 5), (1, 0), (1, 2), (1, 5)]:
        stopped, resumed = make(), make()
        assert [_iterate(stopped) for _ in range(epoch)] == epochs[:epoch]
        iterator = iter(stopped)
        assert _take(iterator, step) == epochs[epoch][:step]
        resumed.load_state_dict(stopped.state_dict())
        assert [_iterate(resumed) for _ in range(2)] == [epochs[epoch][step:], epochs[epoch + 1]]
    list(iterator)
    resumed.load_state_dict(stopped.state_dict())  # which has seen the end
    assert [_iterate(resumed) for _ in range(2)] == epochs[2:4]


def test_ranks_of_a_stream_that_have_loaded_their_own_states_save_what_can_be_merged(data: Path) -> None:
    ranks = [_stream(data, rank, 2) for rank in range(2)]
    batches = [next(iter(loader)) for loader in ranks]
    states = [loader.state_dict() for loader in ranks]
    resumed = [_stream(data, rank, 2) for rank in range(2)]
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    assert [loader.state_dict() for loader in resumed] == states
    alone = _stream(data)
    alone.load_state_dict(merge_stream_states([loader.state_dict() for loader in resumed]))
    rest = list(itertools.takewhile(lambda batch: batch.epoch == 0, alone))
    assert Counter(i for batch in batches + rest for i in ids_of(batch)) == Counter(
        itertools.chain(*_epochs("stream", data)[0])
    )


@pytest.mark.parametrize("epoch", [-1, 1 << 31, 0.5, "1"])
@pytest.mark.parametrize("make", [_windows, lambda data: _elastic(data).batch_sampler], ids=["begin_at", "set_epoch"])
def test_an_epoch_that_no_state_could_have_is_refused_where_it_is_set(data: Path, make: Any, epoch: Any) -> None:
    loader = make(data)
    move = loader.set_epoch if hasattr(loader, "set_epoch") else loader.begin_at
    with pytest.raises(ConfigError, match=f"^the epoch must be an integer from 0 to 2147483647, got {epoch!r}$"):
        move(epoch)
    assert loader.state_dict()["epoch"] == loader.epoch == 0


class TwoLines(FolderLog):
    def mark(self, position: int) -> str:
        return "two\nlines"


def test_a_state_that_could_not_be_loaded_is_not_saved(data: Path) -> None:
    log = data.with_name("log")
    loader = _log(TwoLines(log / "train", read_manifest(log)))
    message = (
        r"^the state of the log's loader has mark 'two\\nlines', expected text of one line; it could not be loaded$"
    )
    with pytest.raises(StateError, match=message):
        loader.state_dict()
