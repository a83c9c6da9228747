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


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_is_raised_and_not_kept_and_leaves_no_one_waiting(error: type[BaseException]) -> None:
    memo: Memo[int] = Memo(4)

    def fail() -> int:
        raise error

    with pytest.raises(error):
        memo.get("key", fail)
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


def test_the_latest_values_are_kept_and_a_copy_through_pickle_begins_empty() -> None:
    memo: Memo[int] = Memo(2)
    computed: list[int] = []

    def compute(key: int) -> int:
        computed.append(key)
        return 10 * key

    def get(memo: Memo[int], key: int) -> int:
        return memo.get(key, lambda: compute(key))

    assert [get(memo, key) for key in (1, 2, 1, 2, 3, 2, 3, 1)] == [10, 20, 10, 20, 30, 20, 30, 10]
    assert computed == [1, 2, 3, 1]
    copy = pickle.loads(pickle.dumps(memo))
    assert [get(copy, key) for key in (1, 2, 3, 1)] == [10, 20, 30, 10]
    assert computed == [1, 2, 3, 1] * 2  # it keeps as many
