"""Values are computed once, whatever number of threads ask for them, and the latest few are kept."""

import multiprocessing
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from evenrank.dataloader.sampling.balanced_steps import Memo


def test_threads_that_ask_for_one_value_wait_for_the_one_that_computes_it() -> None:
    memo: Memo[int] = Memo(4)
    computed = []
    may_end = threading.Event()

    def compute() -> int:
        computed.append(1)
        may_end.wait()
        return 7

    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(memo.get, "key", compute) for _ in range(4)]
        assert memo.get("other", lambda: 1) == 1  # does not wait for them
        may_end.set()
        assert [result.result() for result in results] == [7] * 4
    assert computed == [1]


def test_an_interrupt_leaves_no_one_waiting() -> None:
    memo: Memo[int] = Memo(4)

    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memo.get("key", interrupted)
    assert memo.get("key", lambda: 3) == 3


def test_a_forked_child_does_not_wait_for_threads_of_its_parent() -> None:
    memo: Memo[int] = Memo(4)
    has_begun, may_end = threading.Event(), threading.Event()

    def compute() -> int:
        has_begun.set()
        may_end.wait()
        return 7

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(memo.get, "key", compute)
        try:
            has_begun.wait()
            child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(memo.get("key", lambda: 5)))
            child.start()
            child.join(30)
            assert child.exitcode == 5
        finally:
            may_end.set()
        assert result.result() == 7


def test_the_latest_values_are_kept() -> None:
    memo: Memo[int] = Memo(2)
    computed = []

    def get(key: int) -> int:
        def compute() -> int:
            computed.append(key)
            return 10 * key

        return memo.get(key, compute)

    assert [get(key) for key in (1, 2, 1, 2, 3, 2, 3, 1)] == [10, 20, 10, 20, 30, 20, 30, 10]
    assert computed == [1, 2, 3, 1]


def test_an_error_is_raised_and_not_kept() -> None:
    memo: Memo[int] = Memo(2)
    with pytest.raises(ZeroDivisionError):
        memo.get("key", lambda: 1 // 0)
    assert memo.get("key", lambda: 3) == 3


def test_a_copy_through_pickle_begins_empty() -> None:
    memo: Memo[int] = Memo(2)
    memo.get("key", lambda: 3)
    copy = pickle.loads(pickle.dumps(memo))
    assert copy.get("key", lambda: 4) == 4
    assert [copy.get(key, lambda: 1) for key in (1, 2)] == [1, 1]
    assert copy.get("key", lambda: 5) == 5  # it keeps as many
