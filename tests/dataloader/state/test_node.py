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

Node = Any  # a torchdata node, untyped

_SAMPLES = [{"item_id": list(range(i % 4)), "sample_ids": i} for i in range(11)]


def _identity(item: Any) -> Any:
    return item


def _loader(path: Path, batch_size: int = 40, build: Any = build_loader) -> Any:
    config = LoaderConfig(batch_size=batch_size, max_num_candidates=1, num_workers=1)
    if build is RandomBatches:
        return RandomBatches(config, num_batches=4, num_distinct=3)
    options = {"stream": STREAM} if build is build_stream_loader else {}
    return build(path, config, rank=0, world_size=1, **options)


STREAM = StreamConfig(lanes=3, window_rows=16)
_stateful = partial(StatefulDataLoader, _SAMPLES, batch_size=3, collate_fn=COLLATE)
_in_threads = partial(nodes.ParallelMapper, num_workers=2, method="thread")
_stream = partial(_loader, build=build_stream_loader)
_random = partial(_loader, build=RandomBatches)


def _balance(batches: Any, batch_size: int | None = None) -> Balancer[Any]:
    return Balancer(batches, BalanceConfig(cost=one_per_sample, batch_size=batch_size))


def _mixed(path: Path, wrap: Callable[[Any], Node] = _identity) -> Node:
    return nodes.MultiNodeWeightedSampler(
        {"a": wrap(_loader(path)), "b": wrap(_loader(path, 25))},
        {"a": 0.5, "b": 0.5},
        stop_criteria="ALL_DATASETS_EXHAUSTED",
        rank=0,
        world_size=1,
    )


NODES: dict[str, Callable[[Path], Node]] = {
    "loader": _loader,
    "stream": _stream,
    "random batches": _random,
    "balancer over random batches": lambda path: _balance(_random(path)),
    "balancer over a stream": lambda path: _balance(_stream(path)),
    "balancer over a StatefulDataLoader": lambda path: _balance(_stateful()),
    "balancer over nodes": lambda path: _balance(nodes_over(_SAMPLES, 3)),
    "balancer over a prefetcher over a loader": lambda path: _balance(nodes.Prefetcher(_loader(path), 3)),
    "balancer over a mapper over a stream": lambda path: _balance(nodes.Mapper(_stream(path), _identity)),
    "balancer over a mixture": lambda path: _balance(_mixed(path), batch_size=40),
    "prefetcher over a balancer": lambda path: nodes.Prefetcher(_balance(_loader(path)), 2),
    "mapper over a balancer over nodes": lambda path: nodes.Mapper(_balance(nodes_over(_SAMPLES, 3)), _identity),
    "parallel mapper over a balancer": lambda path: _in_threads(_balance(_loader(path)), _identity),
    "mixture of balancers": lambda path: _mixed(path, _balance),
}


def _take(iterator: Iterator[Any], count: int) -> list[Any]:
    return [ids_of(next(iterator)) for _ in range(count)]


def _rest(node: Node) -> list[Any]:
    """Take all items through the interface of nodes; `for` begins another epoch of ours."""
    items: list[Any] = []
    while (item := next(node, None)) is not None:
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
            assert _rest(stopped) == each
        stopped.reset()
        assert _take(stopped, step) == whole[:step]
        state = stopped.state_dict()
        node.reset(state)
        assert _rest(node) == whole[step:]  # nothing at the end of the epoch
        if step and "mixture" not in kind:  # which begins an epoch again that it has taken nothing of
            node.reset(state)
            node.reset()
            assert _rest(node) == epochs[epoch + 1]


def test_reset_begins_the_next_epoch_once_and_a_pickled_node_has_no_iterator(small_dataset: Path) -> None:
    other = _loader(small_dataset)
    expected = [[ids_of(batch) for batch in other] for _ in range(2)]
    node = _loader(small_dataset)
    first = [ids_of(batch) for batch in node]
    node.reset()
    node.reset()
    again = [ids_of(next(node))]
    copy = pickle.loads(pickle.dumps(node))
    copy.load_state_dict(node.state_dict())
    assert [first, again + [ids_of(batch) for batch in copy]] == expected
    assert [first, again + _rest(node)] == expected
