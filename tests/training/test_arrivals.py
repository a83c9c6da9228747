"""Ranks that are behind are named, and none that is not."""

import re
import threading
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from evenrank.dataloader.balance.ranks.process_group import Members
from evenrank.training.watch import Arrivals, arrivals_line


def test_ranks_that_have_published_nothing_are_behind() -> None:
    store = HashStore()
    ranks = [Arrivals(Members(rank=rank, world_size=3, store=store)) for rank in range(3)]
    ranks[0].publish(5)
    ranks[1].publish(4)
    assert ranks[0].line(5) == "2 of 3 ranks have not arrived at heartbeat 5: 1 (at 4), 2 (at 0)"
    assert ranks[1].line(5) == "1 of 3 ranks have not arrived at heartbeat 5: 2 (at 0)"  # its latest is not published


def test_one_process_has_nobody_to_ask() -> None:
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
    line = arrivals_line(counts)
    behind = [rank for rank, count in enumerate(counts) if count < max(counts)]
    if not behind:
        assert line == f"all {len(counts)} ranks have arrived at heartbeat {max(counts)}"
        return
    start, names = line.split(": ")
    assert start == f"{len(behind)} of {len(counts)} ranks have not arrived at heartbeat {max(counts)}"
    named = [int(rank) for rank in re.findall(r"(\d+) \(at", names)]
    assert named == behind[:16]
    assert ("more" in names) == (len(behind) > 16)
