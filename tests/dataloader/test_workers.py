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
from evenrank.dataloader import LoaderConfig, StreamConfig, build_loader, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.workers import Workers
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import all_ids, ids_of


def _loader(path: Path, transform: Any = None, build: Any = build_loader, **options: Any) -> Any:
    config = LoaderConfig(**{"batch_size": 8, "num_workers": 2, "prefetch": 2, **options})
    return build(path, config, rank=0, world_size=1, transform=transform)


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
def test_an_error_is_raised_in_place_of_its_result(small_dataset: Path, num_workers: int) -> None:
    computes: list[Any] = [lambda item: 6 // (2 - item), lambda item: next(iter([3] * (2 - item)))]
    for compute, error in zip(computes, ("division", "StopIt"), strict=True):
        results = Workers(num_workers, ahead=2, persistent=False).map(compute, range(5))
        assert [next(results), next(results)] == [3, compute(1)]
        with pytest.raises((ZeroDivisionError, RuntimeError), match=error):
            next(results)

    def stop_in_step_3(batch: Any, rng: np.random.Generator) -> Any:
        return next(iter([])) if batch.step == 3 else batch

    for build in (build_loader, build_stream_loader):  # a transform cannot end an epoch early
        loader = _loader(small_dataset, stop_in_step_3, build, num_workers=num_workers)
        for epoch, batches in enumerate((loader, NodeLoader(loader))):
            message = f"the transform raised StopIteration in step 3 of epoch {epoch}; pass next"
            with pytest.raises(RuntimeError, match=message):
                list(batches)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_threads_stop_with_their_iteration_or_are_kept_until_closed(
    small_dataset: Path, persistent_workers: bool
) -> None:
    before, loader = _threads(), _loader(small_dataset, persistent_workers=persistent_workers)
    samples = sorted(all_ids(loader))
    threads = _threads() - before
    assert len(threads) == 2 * persistent_workers
    assert sorted(all_ids(loader)) == samples
    assert _threads() - before == threads
    iterator = iter(loader)
    seen = ids_of(next(iterator))
    loader.close()  # an open iteration goes on
    assert sorted(seen + all_ids(iterator)) == samples
    iterator = iter(loader)  # it can be used again
    next(iterator)
    assert _threads() - before
    iterator.close()
    loader.close()
    for thread in _threads() - before:  # which are told to stop, but not awaited
        thread.join(timeout=60)
    assert not _threads() - before


@pytest.mark.skipif(not hasattr(threading, "_shutdown_locks_lock"), reason="this Python has no such lock")
def test_an_iterator_may_be_finalized_while_its_thread_holds_the_lock_of_joins(small_dataset: Path) -> None:
    iterator, finalized = iter(_loader(small_dataset)), threading.Event()
    next(iterator)

    def finalize() -> None:
        # As when the garbage collector runs while `threading` starts a thread.
        with threading._shutdown_locks_lock:  # type: ignore[attr-defined]
            iterator.close()
            finalized.set()

    threading.Thread(target=finalize, daemon=True).start()
    assert finalized.wait(timeout=60)
    for thread in _threads():
        thread.join(timeout=60)


def _send_rest(batches: Any, pipe: Connection) -> None:
    try:
        pipe.send(all_ids(batches))
    except ConfigError as error:
        pipe.send(str(error))


def _in_process(method: str, batches: Any) -> Any:
    """Return the ids of the samples, or the error, that batches give in another process."""
    context: Any = multiprocessing.get_context(method)
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_send_rest, args=(batches, child_end))
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
    first = all_ids(loader)  # its threads are running when the process is created
    state = loader.state_dict()
    second = _in_process(method, loader)
    assert (sorted(second), loader.state_dict()) == (sorted(first), state)
    assert all_ids(loader) == second  # the next epoch is the same in both processes
    loader.close()


def _stream(path: Path) -> Any:
    config, stream = LoaderConfig(batch_size=8, num_workers=2), StreamConfig(lanes=5, window_rows=2)
    return build_stream_loader(path, config, stream, rank=0, world_size=1)


KINDS: dict[str, Any] = {
    "loader": _loader,
    "persistent workers": lambda path: _loader(path, persistent_workers=True),
    "stream": _stream,
    "Balancer": lambda path: Balancer(_loader(path), BalanceConfig(cost=COST)),
}


@FORKS
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_goes_on_with_an_open_iterator_or_says_why_not(small_dataset: Path, kind: str) -> None:
    iterator = iter(KINDS[kind](small_dataset))
    for _ in range(3):
        next(iterator)
    of_child = _in_process("fork", iterator)
    rest = all_ids(iterator)  # the parent goes on, whatever the child did
    assert len(rest) > 72
    refused = "the Balancer was created before this process was forked; create one after that"
    assert of_child == (refused if kind == "Balancer" else rest)


def _add_noise(batch: Any, rng: np.random.Generator) -> Any:
    batch.num_candidates += int(rng.integers(0, 1 << 40))
    return batch


def test_the_random_numbers_of_a_transform_do_not_depend_on_the_workers(small_dataset: Path) -> None:
    drawn = []
    for num_workers, prefetch in ((0, 1), (1, 3), (3, 2)):
        loader = _loader(small_dataset, _add_noise, num_workers=num_workers, prefetch=prefetch)
        drawn.append([int(batch.num_candidates[0]) for _ in range(2) for batch in loader])
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0])) == len(drawn[0])
