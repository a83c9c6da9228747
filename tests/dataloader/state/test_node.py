"""Loaders and Balancers among the nodes of torchdata; for these alone, see `laws/test_positions.py`."""

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.dataloader import LoaderConfig, StreamConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import one_per_sample
from tests.dataloader.batch_helpers import COLLATE, ids_of

SAMPLES = [{"item_id": list(range(i % 4)), "sample_ids": i} for i in range(11)]
ONE: dict[str, Any] = {"rank": 0, "world_size": 1}


def _identity(item: Any) -> Any:
    return item


def _loader(path: Path, batch_size: int = 40) -> Any:
    return build_loader(path, LoaderConfig(batch_size=batch_size, max_num_candidates=1, num_workers=1), **ONE)


def _stream(path: Path) -> Any:
    config = LoaderConfig(batch_size=40, max_num_candidates=1, num_workers=1)
    return build_stream_loader(path, config, StreamConfig(lanes=3, window_rows=16), **ONE)


def _balance(batches: Any, batch_size: int | None = None) -> Balancer[Any]:
    return Balancer(batches, BalanceConfig(cost=one_per_sample, batch_size=batch_size))


def _mixed(path: Path, wrap: Callable[[Any], Any] = _identity) -> Any:
    of_both = {"a": wrap(_loader(path)), "b": wrap(_loader(path, 25))}
    return nodes.MultiNodeWeightedSampler(of_both, {"a": 0.5, "b": 0.5}, stop_criteria="ALL_DATASETS_EXHAUSTED", **ONE)


def _mapped(node: Any) -> Any:
    return nodes.ParallelMapper(node, _identity, num_workers=2, method="thread")


NODES: dict[str, Callable[[Path], Any]] = {
    "balancer over a StatefulDataLoader": lambda path: _balance(
        StatefulDataLoader(SAMPLES, batch_size=3, collate_fn=COLLATE)
    ),
    "balancer over a prefetcher over a loader": lambda path: _balance(nodes.Prefetcher(_loader(path), 3)),
    "balancer over a mapper over a stream": lambda path: _balance(nodes.Mapper(_stream(path), _identity)),
    "balancer over a mixture": lambda path: _balance(_mixed(path), batch_size=40),
    "parallel mapper over a balancer": lambda path: _mapped(_balance(_loader(path))),
    "mixture of balancers": lambda path: _mixed(path, _balance),
}


def _take(iterator: Iterator[Any], count: int = 99) -> list[Any]:
    """Take items through the interface of nodes; `for` begins another epoch of ours."""
    items: list[Any] = []
    while len(items) < count and (item := next(iterator, None)) is not None:
        items.append(ids_of(item))
    return items


@pytest.mark.parametrize("kind", NODES)
def test_a_node_resumes_after_every_step(small_dataset: Path, kind: str) -> None:
    """Through torchdata's Loader, which moves on to the next epoch where nothing is left of one, and through reset."""
    make_node = partial(NODES[kind], small_dataset)
    loader, node = nodes.Loader(make_node()), make_node()
    epochs = [[ids_of(item) for item in loader] for _ in range(4)]
    assert all(len(epoch) > 2 for epoch in epochs)
    for epoch, step in [*((0, step) for step in range(len(epochs[0]) + 1)), (1, 1), (1, len(epochs[1]))]:
        stopped, resumed = nodes.Loader(make_node()), nodes.Loader(make_node())
        assert [[ids_of(item) for item in stopped] for _ in range(epoch)] == epochs[:epoch]
        assert _take(iter(stopped), step) == epochs[epoch][:step]
        resumed.load_state_dict(pickle.loads(pickle.dumps(stopped.state_dict())))
        following = [epochs[epoch][step:], *epochs[epoch + 1 :]]
        assert [[ids_of(item) for item in resumed] for _ in range(2)] == [each for each in following if each][:2]
    for step in range(len(epochs[0]) + 1):
        stopped = make_node()
        stopped.reset()
        assert _take(stopped, step) == epochs[0][:step]
        state = stopped.state_dict()
        node.reset(state)
        assert _take(node) == epochs[0][step:]  # nothing at the end of the epoch
        if step and "mixture" not in kind:  # which begins an epoch again that it has taken nothing of
            node.reset(state)
            node.reset()
            assert _take(node) == epochs[1]


def test_a_pickled_node_has_no_iterator(small_dataset: Path) -> None:
    node = _stream(small_dataset)
    node.reset()
    assert _take(node, 1) != []
    copy = pickle.loads(pickle.dumps(node))
    copy.load_state_dict(node.state_dict())
    assert [ids_of(batch) for batch in copy] == _take(node) != []
