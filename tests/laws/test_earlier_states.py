"""States of earlier versions: all kinds of loader refuse them, with how to go on, and `begin_after` takes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import StateError
from evenrank.dataloader.state.checks import checksum
from tests.dataloader.batch_helpers import ids_of
from tests.laws.kinds import KINDS, make
from tests.laws.making import Job
from tests.laws.test_positions import check_refused

_IDS = '{"item_id": "keep int64", "user_id": "keep int64"}'
# As these versions have saved them, after the first step.
EARLIER: dict[str, dict[str, Any]] = {
    "loader": {
        "version": 4,
        "epoch": 0,
        "position": 6,
        "seed": 7,
        "num_samples": 20,
        "fingerprint": "b9ace5f9cb53601d8029de219b81541a0a98a60c1a6f5df365bcc0c93b68b835",
        "vocabulary": "{}",
        "pending": "",
        "dist_type": "{}",
        "checksum": "1916036419653c2b",
    },
    "windows of time": {
        "version": 5,
        "epoch": 0,
        "position": 8,
        "seed": 0,
        "num_samples": 102,
        "fingerprint": "f5883f605720f0d09835a4dadb6d250692b47beab2fef2c7e467b0c61d367a19",
        "vocabulary": _IDS,
        "pending": "",
        "dist_type": "{}",
        "begin_ms": 1599696000000,
        "end_ms": 1600300800000,
        "checksum": "2e08dbd748db24c3",
    },
    "random": {
        "version": 3,
        "epoch": 0,
        "position": 4,
        "fingerprint": "322be26afdb76ad673ee6602f9f7f1f23af10123635538d1275c8f01923e168e",
        "checksum": "824933781694db3d",
    },
    "stream": {
        "version": 3,
        "epoch": 0,
        "position": 1,
        "seed": 0,
        "num_shards": 2,
        "fingerprint": "dde23c3069fb74f661baa864212d1fc79dad0c1ed2113dda309c20902d32d81b",
        "vocabulary": _IDS,
        "places": {"0": [1, 0, "3d6063c147c7fc0c"], "1": [0, 4, "6e1e0a42e78997d1"]},
        "dist_type": "{}",
        "checksum": "0d4e515bf167ef27",
    },
    "log": {
        "version": 1,
        "epoch": 0,
        "position": 3,
        "seed": 0,
        "mark": '["00000.parquet", 0, 7, "1748744014543eaf", 1, [""]]',
        "vocabulary": _IDS,
        "dist_type": "{}",
        "checksum": "92e1f53a2074dea2",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_refuse_them_in_one_line_that_says_how_to_go_on(data: Path, kind: str) -> None:
    loader = make(data, Job(kind=kind))
    fresh = loader.state_dict()
    for state in EARLIER.values():
        message = (
            rf"^the loader's state has version {state['version']}, expected 6; go on after it with begin_after, or f"
        )
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(state)
        assert loader.state_dict() == fresh


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("earlier", EARLIER)
def test_the_epoch_after_them_begins(data: Path, kind: str, earlier: str) -> None:
    loader = make(data, Job(kind=kind))
    if (kind, earlier) == ("log", "log"):
        with pytest.raises(ValueError, match=r"was replaced or deleted|of another log"):
            loader.begin_after(EARLIER[earlier])
    elif "windows" in kind and earlier != "windows of time":
        with pytest.raises(StateError, match=r"^the loader's state has no window of time: .*; call begin_at with"):
            loader.begin_after(EARLIER[earlier])
    else:
        loader.begin_after(EARLIER[earlier])
        # The first window of this loader begins where that one ends.
        assert loader.epoch == loader.state_dict()["epoch"] == (0 if "windows" in kind else 1)


def _as_version_1(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a log as the first version had it."""
    covered = {name: state[name] for name in ("epoch", "position", "seed")}
    covered |= {"mark": state["place"], "vocabulary": state["vocabulary"]}
    return {"version": 1, **covered, "dist_type": state["dist_type"], "checksum": checksum(1, *covered.values())}


def test_a_log_goes_on_after_what_was_trained(data: Path) -> None:
    loader, later = (make(data, Job(kind="log")) for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    later.begin_after(_as_version_1(loader.state_dict()))
    position = loader.state_dict()["position"]
    assert later.state_dict()["position"] == position
    assert [ids_of(batch) for batch in later] == [ids_of(batch) for batch in iterator]


@pytest.mark.parametrize("earlier", [name for name in EARLIER if name != "windows of time"])
def test_one_with_another_character_is_refused(data: Path, earlier: str) -> None:
    """But for the places of a stream, which are of no use any more."""
    loader = make(data, Job(kind="shuffle"))
    places: dict[str, Any] = {"places": {}} if earlier == "stream" else {}
    state = {name: value for name, value in EARLIER[earlier].items() if name != "places"}
    check_refused(state, lambda damaged: loader.begin_after({**damaged, **places}))
