import gc
import logging
import os
import re
import subprocess
import sys
import threading
from datetime import timedelta
from typing import TextIO, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.ranks.process_group import Members, members_of
from evenrank.training import MemoryUsage, MemoryWatch, StallWatch
from evenrank.training.watch import GIB, STORE_TIMEOUT, Alarm, Arrivals, arrivals_line
from tests.ranks import RankPool
from tests.stopped_store import StoreServer, store_server

SECONDS = 0.2  # without a heartbeat; tests wait for reports, not for this long


class _Pipe:
    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.writer: TextIO = os.fdopen(writer, "w")
        self.reader: TextIO = os.fdopen(reader)

    def report(self, last_line: str) -> str:
        """Return what is written up to a line that matches; blocks until then."""
        lines: list[str] = []
        while not (lines and re.search(last_line, lines[-1])):
            lines.append(self.reader.readline())
            assert lines[-1], f"ended before {last_line}: {lines}"
        return "".join(lines)

    def close(self) -> str:
        self.writer.close()
        with self.reader:
            return self.reader.read()


def test_an_alarm_rings_once_per_stall_and_not_before_a_heartbeat_has_armed_it() -> None:
    alarm = Alarm(10)
    assert not alarm.rings(1e9)
    alarm.beat(100)
    assert [alarm.rings(now) for now in (100, 109.9, 110, 200)] == [False, False, True, False]
    alarm.beat(201)
    assert [alarm.rings(now) for now in (201, 210, 211, 212)] == [False, False, True, False]
    assert alarm.count == 2
    alarm.beat(300)
    alarm.disarm()
    assert not alarm.rings(1e9)
    alarm.beat(1e9)
    assert alarm.rings(1e9 + 10)


def _hang_here(pipe: _Pipe, last_line: str) -> str:
    return pipe.report(last_line)


def test_the_stacks_of_a_stalled_process_are_written_and_the_next_stall_as_well() -> None:
    gc.collect()  # stacks of at most 100 threads are written, and loaders that other tests left may still have theirs
    pipe = _Pipe()
    with StallWatch(SECONDS, file=pipe.writer) as watch:
        for count in (1, 2):
            watch.beat()
            # The stack of this thread is written last, as it was started first.
            report = _hang_here(pipe, "in test_the_stacks_of_a_stalled")
            assert f"rank 0 has had no heartbeat for 0.2 s, since heartbeat {count}" in report
            assert "in _hang_here" in report
    rest = pipe.close()  # the frames above this test's, whose paths can have any names
    assert not [line for line in rest.splitlines() if not line.startswith("  File ")]  # no ranks, no further report


def _stall_twice(rank: int, world_size: int) -> list[str]:
    """Let rank 1 stay behind, while rank 0 waits for it, and return the reports of this rank."""
    pipe, reports = _Pipe(), []
    with StallWatch(SECONDS, file=pipe.writer) as watch:
        watch.beat()
        for heartbeat in (2, 3):
            if rank == 0:
                watch.beat()
                reports.append(pipe.report(f"not arrived at heartbeat {heartbeat}: 1 "))
                dist.barrier()
            else:
                if heartbeat == 2:
                    reports.append(_hang_here(pipe, "ranks have"))
                dist.barrier()
                watch.beat()
            dist.barrier()
    return reports


def test_the_ranks_that_have_not_arrived_are_named_in_each_stall(ranks: RankPool) -> None:
    reports, (of_rank_1,) = ranks.run(2, _stall_twice)
    assert "rank 1 has had no heartbeat" in of_rank_1
    assert "in _hang_here" in of_rank_1
    for number, report in enumerate(reports):
        line = rf"evenrank: rank 0: 1 of 2 ranks have not arrived at heartbeat {number + 2}: 1 \(at \d\)"
        assert re.fullmatch(line, report.splitlines()[-1])
        assert "in _stall_twice" in report


def _share_a_store(rank: int, world_size: int) -> list[bool]:
    if rank == 0:
        StallWatch(SECONDS)
    store = members_of(None, STORE_TIMEOUT).substore("test")  # as a Balancer's
    store.set(str(rank), "here")
    dist.barrier()
    return [store.check([str(other)]) for other in range(world_size)]


def test_a_watch_on_some_ranks_does_not_separate_the_balancers_of_a_group(ranks: RankPool) -> None:
    assert ranks.run(2, _share_a_store) == [[True, True]] * 2


def _stall_without_a_store(rank: int, world_size: int, server: StoreServer) -> str:
    dist.destroy_process_group()
    store = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=1))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    pipe = _Pipe()
    with StallWatch(SECONDS, file=pipe.writer) as watch:
        server.stop()
        watch.beat()
        return _hang_here(pipe, "in _stall_without_a_store")


def test_a_stall_is_reported_although_the_store_does_not_answer(ranks: RankPool) -> None:
    with store_server() as server:
        (report,) = ranks.run(1, _stall_without_a_store, server)
    assert "rank 0 has had no heartbeat for 0.2 s, since heartbeat 1" in report


def _stall_with_a_broken_file(rank: int, world_size: int) -> list[str]:
    """Let rank 1's reports fail, and return what rank 0 says of it in its own stalls."""
    pipe, reports = _Pipe(), []
    if rank == 1:
        pipe.reader.close()  # a write raises BrokenPipeError
    with StallWatch(SECONDS, file=pipe.writer) as watch:
        for heartbeat in (1, 2):
            if rank == 1:
                watch.beat()
                while watch._arrivals._published < heartbeat or watch._alarm._rung_at < heartbeat:
                    assert watch._thread is not None
                    assert watch._thread.is_alive()
                    watch._closing.wait(0.01)
            dist.barrier()
            if rank == 0:
                watch.beat()
                reports.append(pipe.report("ranks have"))
            dist.barrier()
    if rank == 1:
        with pytest.raises(BrokenPipeError):
            pipe.writer.close()
    return [report.splitlines()[-1] for report in reports]


def test_a_rank_whose_reports_cannot_be_written_is_still_watched(ranks: RankPool) -> None:
    reports, _ = ranks.run(2, _stall_with_a_broken_file)
    assert reports == [f"evenrank: rank 0: all 2 ranks have arrived at heartbeat {number}" for number in (1, 2)]


def test_the_thread_ends_with_the_watch() -> None:
    def watching() -> int:
        return sum(thread.name == "evenrank-stall-watch" for thread in threading.enumerate())

    with StallWatch(60) as watch:
        assert watching() == 0  # not armed
        watch.beat()
        assert watching() == 1
    assert watching() == 0
    watch.close()
    with pytest.raises(ConfigError, match="the StallWatch is closed; create another one"):
        watch.beat()
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"StallWatch: seconds must be above 0 and finite, got {seconds}"):
            StallWatch(seconds)


@pytest.mark.parametrize("file", ["None", "open('/dev/null')"])
def test_standard_error_gets_the_report_and_a_watched_process_ends(file: str) -> None:
    code = f"""
import sys
from evenrank.training import StallWatch
file = {file}
StallWatch(0.05, file=file).beat()
if file is not None:
    file.close()  # while it is in use
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-P", "-c", code], text=True, stdin=pipe, stderr=pipe) as process:
        stdin, stderr = cast(TextIO, process.stdin), cast(TextIO, process.stderr)
        first = next(line for line in stderr if line.startswith("evenrank"))
        assert "rank 0 has had no heartbeat for 0.05 s, since heartbeat 1" in first
        stdin.close()  # ends the stall, and the process
        rest = stderr.read()
    assert "File" in rest
    assert "Error" not in rest
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("unallocated", "free", "reason"),
    [
        (40 * GIB + 1, 10 * GIB, "more than 50% of the device is reserved but unallocated"),
        (GIB, 2 * GIB - 1, "less than 2 GiB is free"),
        *[(40 * GIB, 10 * GIB, None), (GIB, 2 * GIB, None), (0, 0, None)],  # at last, there is nothing to release
    ],
)
def test_the_limits_are_half_of_the_device_and_two_gibibytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unallocated: int, free: int, reason: str | None
) -> None:
    assert _warnings_of(MemoryWatch("cuda"), monkeypatch, caplog, unallocated, free) == ([reason] if reason else [])


def _warnings_of(
    watch: MemoryWatch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    unallocated: int,
    free: int,
) -> list[str]:
    """Return the reasons for which a watch releases the cache of a device of 80 GiB."""
    usage = MemoryUsage(allocated=5 * GIB, reserved=5 * GIB + unallocated, free=free, total=80 * GIB)
    monkeypatch.setattr(watch, "usage", lambda: usage)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        assert watch.check() == usage
    return [message.partition("; ")[2].partition(", so ")[0] for message in caplog.messages]


def test_other_limits_are_arguments(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch("cuda", min_free_gib=0.5, max_unallocated=0.25)
    for unallocated, free, reasons in (
        (20 * GIB, GIB // 2, []),
        (20 * GIB + 1, GIB // 2, ["more than 25% of the device is reserved but unallocated"]),
        (GIB, GIB // 2 - 1, ["less than 0.5 GiB is free"]),
    ):
        assert _warnings_of(watch, monkeypatch, caplog, unallocated, free) == reasons
    never = MemoryWatch("cuda", min_free_gib=0, max_unallocated=1)
    assert _warnings_of(never, monkeypatch, caplog, 75 * GIB, 0) == []
    for least in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"MemoryWatch: min_free_gib must be at least 0, got {least}"):
            MemoryWatch("cuda", min_free_gib=least)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=f"max_unallocated must be at least 0 and at most 1, got {share}"):
            MemoryWatch("cuda", max_unallocated=share)


class _Filling(MemoryWatch):
    """A device of 80 GiB, 50 of which are cached, until the cache is released."""

    def usage(self) -> MemoryUsage:
        reserved = (51 if _Filling.is_cached else 1) * GIB
        return MemoryUsage(allocated=GIB, reserved=reserved, free=80 * GIB - reserved, total=80 * GIB)

    is_cached = True


def test_releasing_the_cache_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(_Filling, "is_cached", False))
    watch = _Filling("cuda")
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        assert [watch.check().reserved for _ in range(2)] == [GIB, GIB]
    assert caplog.messages == [
        "memory: 1.0 GiB allocated, 51.0 reserved, 29.0 free of 80.0; more than 50% of the device is reserved but "
        "unallocated, so 50.0 GiB of cache were released"
    ]
    with pytest.raises(ConfigError, match="device is cpu; memory is watched on cuda"):
        MemoryWatch("cpu")


@pytest.mark.gpu
def test_on_a_gpu_a_large_cache_is_released(caplog: pytest.LogCaptureFixture) -> None:
    torch.cuda.empty_cache()
    watch = MemoryWatch(torch.device("cuda", torch.cuda.current_device()))
    start = watch.usage()
    if start.free < 0.6 * start.total:
        pytest.skip(f"the device is in use: {start.line()}")
    kept = torch.ones(GIB // 4, device="cuda")
    assert watch.check().allocated >= start.allocated + GIB
    assert not caplog.messages  # there is no reason
    torch.empty(int(0.55 * start.total), dtype=torch.uint8, device="cuda")  # freed at once
    assert watch.usage().unallocated > start.total / 2
    with caplog.at_level(logging.WARNING, logger="evenrank"):
        after = watch.check()
    assert after.unallocated < GIB
    assert after.free > start.free - 2 * GIB
    assert "more than 50% of the device is reserved but unallocated" in caplog.text
    assert kept.sum() == GIB // 4


def test_ranks_that_have_published_nothing_are_behind() -> None:
    store = HashStore()
    ranks = [Arrivals(Members(rank=rank, world_size=3, store=store)) for rank in range(3)]
    ranks[0].publish(5)
    ranks[1].publish(4)
    assert ranks[0].line(5) == "2 of 3 ranks have not arrived at heartbeat 5: 1 (at 4), 2 (at 0)"
    assert ranks[1].line(5) == "1 of 3 ranks have not arrived at heartbeat 5: 2 (at 0)"  # its latest is not published
    alone = Arrivals(Members(rank=0, world_size=1, store=None))
    alone.publish(1)
    assert alone.line(1) is None


def test_publishing_does_not_wait_for_training_that_waits_in_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30), wait_for_workers=False)
    shared = [PrefixStore("group", store) for store in (server, client)]
    ranks = [Arrivals(Members(rank=rank, world_size=2, store=store)) for rank, store in enumerate(shared)]
    training = threading.Thread(target=client.get, args=("comes late",))
    training.start()
    ranks[1].publish(3)
    assert training.is_alive()
    ranks[0].publish(2)
    assert ranks[0].line(2) == "1 of 2 ranks have not arrived at heartbeat 3: 0 (at 2)"
    server.set("comes late", "now")
    training.join()


@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_exactly_the_ranks_behind_the_furthest_have_not_arrived(counts: list[int]) -> None:
    line, last = arrivals_line(counts), max(counts)
    behind = [rank for rank, count in enumerate(counts) if count < last]
    if behind:
        assert line.startswith(f"{len(behind)} of {len(counts)} ranks have not arrived at heartbeat {last}: ")
        assert [int(rank) for rank in re.findall(r"(\d+) \(at", line)] == behind[:16]
        assert ("more" in line) == (len(behind) > 16)
    else:
        assert line == f"all {len(counts)} ranks have arrived at heartbeat {last}"
