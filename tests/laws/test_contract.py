"""The contract of a loader: each kind has each member, which means the same, or says in one line why it cannot."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import ConfigError
from evenrank.dataloader.sampling.epoch_positions import EpochPositions
from tests.dataloader.batch_helpers import ids_of
from tests.laws.kinds import KINDS, has, make
from tests.laws.making import Job

SIZES = {"requests": 30, "windows of time": 15}  # of batches, so that epochs have a few
NO_LENGTH = (TypeError, "^a log grows, so its batches are not numbered before it ends; iterate over them without a l")
# What raises an error, and its one line, which has the reason and the remedy.
CANNOT: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("log", "len"): NO_LENGTH,
    ("log", "remaining_batches"): NO_LENGTH,
    ("log", "num_samples"): NO_LENGTH,
    ("log", "another iteration"): (ConfigError, "^a log is iterated over once; to go on, load_state_dict what state_"),
    **{
        (kind, "transform of balanced batches"): (ConfigError, "^balance plans from the lengths in the store, which a")
        for kind in (
            "shuffle",
            "stochastic length",
            "padded tokens",
            "rows",
            "mixture",
            "windows of time",
            "targets",
            "windows of targets",
            "requests",
            "own order",
        )
    },
}
# What others than loaders of ours do: a Dataset and its DataLoader transform; a Balancer balances what is read first.
NOT_ASKED = {(kind, "transform of balanced batches") for kind in ("stream", "log", "random", "elastic")}


def _job(kind: str, **options: Any) -> Job:
    return Job(kind=kind, batch_size=SIZES.get(kind, 10), prefetch=1, **options)


def _ids(loader: Any) -> list[list[int]]:
    return [ids_of(batch) for batch in loader]


def _iter(data: Path, kind: str) -> None:
    batches = list(make(data, _job(kind)))
    assert len(batches) > 1
    assert [batch.step for batch in batches] == [*range(len(batches))]
    assert {batch.epoch for batch in batches} == {0}


def _another_iteration(data: Path, kind: str) -> None:
    loader = make(data, _job(kind))
    list(loader)
    assert {batch.epoch for batch in loader} == {1}
    assert loader.epoch == 2


def _len(data: Path, kind: str) -> None:
    loader = make(data, _job(kind))
    length = len(loader)
    iterator = iter(make(data, _job(kind)))
    assert length == len([*iterator])


def _remaining_batches(data: Path, kind: str) -> None:
    loader, resumed = (make(data, _job(kind)) for _ in range(2))
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    assert resumed.remaining_batches() == len(make(data, _job(kind))) - 1 == len(_ids(resumed))


def _num_samples(data: Path, kind: str) -> None:
    loader = make(data, _job(kind))
    num_samples = loader.num_samples
    *_, last = loader
    assert last.position == num_samples


def _position(data: Path, kind: str) -> None:
    """Position 0 of 1 is as many samples as all ranks have been given, and those of rows that are none."""
    ranks = [make(data, replace(_job(kind), batch_size=5).of(rank, 2)) for rank in range(2)]
    for step, batches in enumerate(zip(*ranks, strict=True)):
        assert {batch.position for batch in batches} == {loader.state_dict()["position"] for loader in ranks}
        if step == 0:
            assert batches[0].position == 10


def _state_dict(data: Path, kind: str) -> None:
    ranks = [make(data, replace(_job(kind), batch_size=5).of(rank, 2)) for rank in range(2)]
    iterators = [iter(loader) for loader in ranks]
    batches = [next(iterator) for iterator in iterators]
    for iterator in iterators:
        next(iterator)
    first, second = (loader.state_dict(after=batch) for loader, batch in zip(ranks, batches, strict=True))
    assert first == second
    assert (first["version"], first["epoch"], first["position"]) == (6, 0, batches[0].position)


def _load_state_dict(data: Path, kind: str) -> None:
    loader, resumed, other = (make(data, _job(kind)) for _ in range(3))
    iterator = iter(loader)
    next(iterator)
    resumed.load_state_dict(loader.state_dict())
    rest = _ids(iterator)
    assert _ids(resumed) == rest
    # A state of another kind is refused.
    of_other = make(data, _job("elastic" if kind != "elastic" else "shuffle")).state_dict()
    with pytest.raises(ValueError, match=r"^the loader's state .*; "):
        other.load_state_dict(of_other)


def _begin_after(data: Path, kind: str) -> None:
    whole, loader, later = (make(data, _job(kind)) for _ in range(3))
    next(iter(loader))
    later.begin_after(loader.state_dict())
    if has(kind, "epochs"):
        _ids(whole)
        assert later.epoch == 1
        assert _ids(later) == _ids(whole)
    else:  # what follows is the rest
        assert _ids(later) == _ids(whole)[1:]
    # A state of another kind, too.
    later = make(data, _job(kind))
    if "windows" not in kind:  # which go on at the time where another ends
        later.begin_after(make(data, _job("elastic")).state_dict())
        assert later.epoch == 1


def _seen_by(path: Path, batch: Any, _: Any) -> Any:
    with path.open("a") as file:
        file.write(f"{os.getpid()} {threading.current_thread().name}\n")
    batch.sample_ids += 1000
    return batch


def _transformed(data: Path, kind: str, **options: Any) -> tuple[Any, set[str]]:
    path = data.with_name(f"transformed-{time.monotonic_ns()}")
    loader = make(data, _job(kind, transform=partial(_seen_by, path), **options))
    assert all(sample >= 1000 for batch in _ids(loader) for sample in batch)
    return loader, set(path.read_text().splitlines())


def _transform(data: Path, kind: str) -> None:
    assert _transformed(data, kind)[1] == {f"{os.getpid()} {threading.current_thread().name}"}


def _transform_of_balanced(data: Path, kind: str) -> None:
    _transformed(data, kind, way="alone")


def _num_workers(data: Path, kind: str) -> None:
    """They transform, too, and what comes is the same."""
    expected = _ids(make(data, _job(kind)))
    assert _ids(make(data, _job(kind, workers=2))) == expected
    _, seen = _transformed(data, kind, workers=2)
    assert f"{os.getpid()} {threading.current_thread().name}" not in seen


def _close(data: Path, kind: str) -> None:
    """It stops the workers that are kept, if there are any, and another iteration starts new ones."""
    make(data, _job(kind)).close()
    loader, _ = _transformed(data, kind, workers=1, keeps_workers=True)
    state = loader.state_dict()
    for _ in range(2):
        loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("evenrank-loader")]
    if has(kind, "epochs"):
        assert _ids(loader)
        loader.close()
    loader.load_state_dict(state)


def _left_out(data: Path, kind: str) -> None:
    loader = make(data, _job(kind))
    _ids(loader)
    left_out = loader.left_out
    assert isinstance(left_out, Mapping)
    assert {(type(reason), type(count)) for reason, count in left_out.items()} <= {(str, int)}
    need_a_candidate = ("shuffle", "padded tokens", "stream", "log", "own order")
    assert (sum(left_out.values()) > 0) == (kind in need_a_candidate)
    whole = make(data, _job(kind, workers=1 if has(kind, "threads") else 0))
    _ids(whole)
    assert whole.left_out == left_out


MEMBERS: dict[str, Callable[[Path, str], None]] = {
    "iter": _iter,
    "another iteration": _another_iteration,
    "len": _len,
    "remaining_batches": _remaining_batches,
    "num_samples": _num_samples,
    "position": _position,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "begin_after": _begin_after,
    "transform": _transform,
    "transform of balanced batches": _transform_of_balanced,
    "num_workers": _num_workers,
    "close": _close,
    "left_out": _left_out,
}


CELLS = [cell for cell in itertools.product(KINDS, MEMBERS) if cell not in NOT_ASKED]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "member"), CELLS)
def test_a_member_works_or_says_why_it_cannot(data: Path, kind: str, member: str) -> None:
    if (error := CANNOT.get((kind, member))) is None:
        MEMBERS[member](data, kind)
        return
    with pytest.raises(error[0], match=error[1]) as raised:
        MEMBERS[member](data, kind)
    assert str(raised.value).isprintable()


def test_no_member_is_missing(data: Path) -> None:
    """All kinds have all public members of positions in epochs, and those that users are told of."""
    members = {name for name in vars(EpochPositions) if not name.startswith("_")} | {"close", "epoch"}
    for kind in KINDS:
        loader = make(data, replace(_job(kind)))
        assert members <= {*dir(loader)}, kind
