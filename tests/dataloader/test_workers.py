import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import Loader as NodeLoader

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, SequenceBatch, StreamConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.loader import Loader
from evenrank.dataloader.workers import Workers
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of


def _loader(path: Path, **options: object) -> Loader[SequenceBatch]:
    config = LoaderConfig(**{"batch_size": 8, "num_workers": 2, "prefetch": 2, **options})  # type: ignore[arg-type]
    return build_loader(path, config, rank=0, world_size=1)


def _ids(loader: Loader[SequenceBatch]) -> list[int]:
    return [sample for batch in loader for sample in ids_of(batch)]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("evenrank-loader")}


def test_results_come_in_order_and_no_further_ahead_than_allowed() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    results = Workers(3, ahead=4, persistent=False).map(lambda item: item * item, items())
    assert next(results) == 0
    assert taken == [0, 1, 2, 3, 4]
    assert list(results) == [item * item for item in range(1, 20)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_raised_in_place_of_its_result(num_workers: int) -> None:
    computes: list[Any] = [lambda item: 6 // (2 - item), lambda item: next(iter([3] * (2 - item)))]
    for compute, error in zip(computes, ("division", "StopIt"), strict=True):
        results = Workers(num_workers, ahead=2, persistent=False).map(compute, range(5))
        assert [next(results), next(results)] == [3, compute(1)]
        with pytest.raises((ZeroDivisionError, RuntimeError), match=error):
            next(results)


@pytest.mark.parametrize("leave_early", [False, True])
def test_threads_stop_with_their_iteration(small_dataset: Path, leave_early: bool) -> None:
    before = _threads()
    iterator: Any = iter(_loader(small_dataset))
    next(iterator)
    assert _threads() - before
    if leave_early:
        iterator.close()
        for thread in _threads() - before:  # which are told to stop, but not awaited
            thread.join(timeout=60)
    else:
        list(iterator)
    assert not _threads() - before


@pytest.mark.skipif(not hasattr(threading, "_shutdown_locks_lock"), reason="this Python has no such lock")
def test_an_iterator_may_be_finalized_while_its_thread_holds_the_lock_of_joins(small_dataset: Path) -> None:
    before = _threads()
    iterator = iter(_loader(small_dataset))
    next(iterator)
    finalized = threading.Event()

    def finalize() -> None:
        # As when the garbage collector runs while `threading` starts a thread.
        with threading._shutdown_locks_lock:  # type: ignore[attr-defined]
            iterator.close()  # type: ignore[attr-defined]
            finalized.set()

    threading.Thread(target=finalize, daemon=True).start()
    assert finalized.wait(timeout=60)
    for thread in _threads() - before:
        thread.join(timeout=60)


def test_persistent_threads_are_kept_until_closed(small_dataset: Path) -> None:
    before = _threads()
    loader = _loader(small_dataset, persistent_workers=True)
    first = sorted(_ids(loader))
    threads = _threads() - before
    assert len(threads) == 2
    assert sorted(_ids(loader)) == first
    assert _threads() - before == threads
    for _ in range(2):  # it can be used again
        loader.close()
        assert _threads() == before
        assert sorted(_ids(loader)) == first
    loader.close()


def _send_rest(iterator: Iterator[Any], pipe: Connection) -> None:
    try:
        pipe.send([ids_of(batch) for batch in iterator])
    except ConfigError as error:
        pipe.send(str(error))


def _send_ids(loader: Any, pipe: Connection) -> None:
    pipe.send(_ids(loader))


def _in_process(method: str, function: Any, argument: Any) -> Any:
    """Return what a function sends from another process."""
    context: Any = multiprocessing.get_context(method)
    parent_end, child_end = context.Pipe()
    process = context.Process(target=function, args=(argument, child_end))
    process.start()
    assert parent_end.poll(240), "the process hangs"
    received = parent_end.recv()
    process.join()
    return received


FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


@FORKS
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_loader_works_in_another_process(small_dataset: Path, method: str) -> None:
    loader = _loader(small_dataset, persistent_workers=True)
    first = _ids(loader)  # its threads are running when the process is created
    state = loader.state_dict()
    second = _in_process(method, _send_ids, loader)
    assert (sorted(second), loader.state_dict()) == (sorted(first), state)
    assert _ids(loader) == second  # the next epoch is the same in both processes
    loader.close()


@FORKS
@pytest.mark.parametrize("kind", ["loader", "loader with persistent workers", "stream", "Balancer"])
def test_a_fork_goes_on_with_an_open_iterator_or_says_why_not(small_dataset: Path, kind: str) -> None:
    loader: Any = _loader(small_dataset, persistent_workers="persistent" in kind)
    if kind == "stream":
        config, stream = LoaderConfig(batch_size=8, num_workers=2), StreamConfig(lanes=5, window_rows=2)
        loader = build_stream_loader(small_dataset, config, stream, rank=0, world_size=1)
    if kind == "Balancer":
        loader = Balancer(loader, BalanceConfig(cost=COST))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    of_child = _in_process("fork", _send_rest, iterator)
    rest = [ids_of(batch) for batch in iterator]  # the parent goes on, whatever the child did
    assert len(rest) > 9
    refused = "the Balancer was created before this process was forked; create one after that"
    assert of_child == (refused if kind == "Balancer" else rest)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_an_open_iteration_goes_on_after_its_loader_is_closed(small_dataset: Path, persistent_workers: bool) -> None:
    before, loader = _threads(), _loader(small_dataset, persistent_workers=persistent_workers)
    expected, iterator = _ids(_loader(small_dataset)), iter(loader)
    seen = ids_of(next(iterator))
    loader.close()
    assert seen + [sample for batch in iterator for sample in ids_of(batch)] == expected
    loader.close()
    assert _threads() == before


def _add_noise(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    batch.num_candidates += int(rng.integers(0, 1 << 40))
    return batch


def test_the_random_numbers_of_a_transform_do_not_depend_on_the_workers(small_dataset: Path) -> None:
    drawn = []
    for num_workers, prefetch in ((0, 1), (1, 3), (3, 2)):
        config = LoaderConfig(batch_size=8, num_workers=num_workers, prefetch=prefetch)
        loader = build_loader(small_dataset, config, rank=0, world_size=1, transform=_add_noise)
        drawn.append([[int(batch.num_candidates[0]) for batch in loader] for _ in range(2)])
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({number for epoch in drawn[0] for number in epoch}) == 2 * len(drawn[0][0])


def _stop_in_step_3(batch: SequenceBatch, rng: np.random.Generator) -> SequenceBatch:
    return next(iter([])) if batch.step == 3 else batch


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("build", [build_loader, build_stream_loader])
def test_transform_cannot_end_an_epoch_early(small_dataset: Path, build: Any, num_workers: int) -> None:
    config = LoaderConfig(batch_size=8, num_workers=num_workers)
    loader = build(small_dataset, config, rank=0, world_size=1, transform=_stop_in_step_3)
    with pytest.raises(RuntimeError, match="the transform raised StopIteration in step 3 of epoch 0; pass next"):
        list(loader)
    with pytest.raises(RuntimeError, match="the transform raised StopIteration in step 3 of epoch 1"):
        list(NodeLoader(loader))
