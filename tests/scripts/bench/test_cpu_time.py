import threading
import time
from pathlib import Path
from typing import Self

from cpu_time import CpuTime

BURNED_NS = 50_000_000


def burn(ns: int) -> None:
    """Compute for so long, on this thread."""
    end = time.thread_time_ns() + ns
    while time.thread_time_ns() < end:
        pass


class Burning:
    """A thread that computes when it is asked to, and then waits until the end."""

    def __init__(self) -> None:
        self._begin, self._burned, self._end = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="burner_12")

    def _run(self) -> None:
        self._begin.wait()
        burn(BURNED_NS)
        self._burned.set()
        self._end.wait()

    def compute(self) -> None:
        self._begin.set()
        self._burned.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._begin.set()
        self._end.set()
        self._thread.join()
        while Path(f"/proc/self/task/{self._thread.native_id}").exists():  # the system ends it after Python
            pass


def test_the_time_of_a_thread_is_under_its_name_and_not_of_the_one_that_asks() -> None:
    with Burning() as thread:
        before = CpuTime.now()
        thread.compute()
        burn(3 * BURNED_NS)
        after = CpuTime.now()
    of_burner = after.by_name_since(before)["burner"]
    assert 0.9 * BURNED_NS < of_burner < 2 * BURNED_NS
    assert 0.9 * BURNED_NS < after.others_since(before) < 2 * BURNED_NS
    assert 3 * BURNED_NS <= after.own - before.own < 4 * BURNED_NS
    assert "ended" not in after.by_name_since(before)
    assert threading.get_native_id() not in after.threads


def test_the_time_of_a_thread_that_has_ended_counts() -> None:
    with Burning() as thread:
        before = CpuTime.now()
        thread.compute()
    after = CpuTime.now()
    times = after.by_name_since(before)
    assert "burner" not in times
    assert 0.9 * BURNED_NS < times["ended"] <= after.others_since(before)
