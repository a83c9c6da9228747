"""Loaders and Balancers among the nodes of torchdata; for these alone, see `laws/test_positions.py`."""

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.dataloader import LoaderConfig, RandomBatches, StreamConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import one_per_sample
from tests.dataloader.batch_helpers import ids_of
from tests.dataloader.own_samples import COLLATE, nodes_over

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


NODES: dict[str, Callable[[Path], Any]] = {
    "distinct random batches": lambda path: RandomBatches(LoaderConfig(batch_size=40), num_batches=4, num_distinct=3),
    "balancer over a StatefulDataLoader": lambda path: _balance(
        StatefulDataLoader(SAMPLES, batch_size=3, collate_fn=COLLATE)
    ),
    "balancer over nodes": lambda path: _balance(nodes_over(SAMPLES, 3)),
    "balancer over a prefetcher over a loader": lambda path: _balance(nodes.Prefetcher(_loader(path), 3)),
    "balancer over a mapper over a stream": lambda path: _balance(nodes.Mapper(_stream(path), _identity)),
    "balancer over a mixture": lambda path: _balance(_mixed(path), batch_size=40),
    "prefetcher over a balancer": lambda path: nodes.Prefetcher(_balance(_loader(path)), 2),
    "parallel mapper over a balancer": lambda path: nodes.ParallelMapper(
        _balance(_loader(path)), _identity, num_workers=2, method="thread"
    ),
    "mixture of balancers": lambda path: _mixed(path, _balance),
}


def _take(iterator: Iterator[Any], count: int = 99) -> list[Any]:
    """Take items through the interface of nodes; `for` begins another epoch of ours."""
    items: list[Any] = []
    while len(items) < count and (item := next(iterator, None)) is not None:
        items.append(ids_of(item))
    return items


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("kind", NODES)
def test_node_resumes_after_every_step(small_dataset: Path, kind: str, epoch: int) -> None:
    """Through torchdata's Loader, which moves on to the next epoch where nothing is left of one, and through reset."""
    make_node = partial(NODES[kind], small_dataset)
    loader, node = nodes.Loader(make_node()), make_node()
    epochs = [[ids_of(item) for item in loader] for _ in range(4)]
    whole = epochs[epoch]
    assert len(whole) > 2
    for step in range(len(whole) + 1):
        stopped, resumed = nodes.Loader(make_node()), nodes.Loader(make_node())
        assert [[ids_of(item) for item in stopped] for _ in range(epoch)] == epochs[:epoch]
        assert _take(iter(stopped), step) == whole[:step]
        resumed.load_state_dict(pickle.loads(pickle.dumps(stopped.state_dict())))
        following = [[ids_of(item) for item in resumed] for _ in range(2)]
        begun = epoch + (step == len(whole))
        assert following == [epochs[begun][step if begun == epoch else 0 :], epochs[begun + 1]]
        stopped = make_node()
        for each in epochs[:epoch]:
            stopped.reset()
            assert _take(stopped) == each
        stopped.reset()
        assert _take(stopped, step) == whole[:step]
        state = stopped.state_dict()
        node.reset(state)
        assert _take(node) == whole[step:]  # nothing at the end of the epoch
        if step and "mixture" not in kind:  # which begins an epoch again that it has taken nothing of
            node.reset(state)
            node.reset()
            assert _take(node) == epochs[epoch + 1]
    if kind == "balancer over a mapper over a stream":  # a pickled node has no iterator
        node = _stream(small_dataset)
        node.reset()
        first = _take(node, 1)
        copy = pickle.loads(pickle.dumps(node))
        copy.load_state_dict(node.state_dict())
        assert first + [ids_of(batch) for batch in copy] == first + _take(node) != first
