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
_MARK = '["00000.parquet", 0, 7, "1748744014543eaf", 1, [""]]'
_PLACES = {"0": [1, 0, "3d6063c147c7fc0c"], "1": [0, 4, "6e1e0a42e78997d1"]}
_OF_ROWS: dict[str, Any] = {"pending": "", "dist_type": "{}"}
_OF_WEEK = {"begin_ms": 1599696000000, "end_ms": 1600300800000, "vocabulary": _IDS, **_OF_ROWS}
_OF_LANES = {"seed": 0, "num_shards": 2, "vocabulary": _IDS, "places": _PLACES, "dist_type": "{}"}


def _state(version: int, position: int, checksum: str, fingerprint: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return a state after the first step, as an earlier version has saved it."""
    of_data = {"fingerprint": fingerprint} if fingerprint else {}
    return {"version": version, "epoch": 0, "position": position, **of_data, **entries, "checksum": checksum}


EARLIER: dict[str, dict[str, Any]] = {
    "loader": _state(
        *(4, 6, "1916036419653c2b", "b9ace5f9cb53601d8029de219b81541a0a98a60c1a6f5df365bcc0c93b68b835"),
        {"seed": 7, "num_samples": 20, "vocabulary": "{}", **_OF_ROWS},
    ),
    "windows of time": _state(
        *(5, 8, "2e08dbd748db24c3", "f5883f605720f0d09835a4dadb6d250692b47beab2fef2c7e467b0c61d367a19"),
        {"seed": 0, "num_samples": 102, **_OF_WEEK},
    ),
    "random": _state(3, 4, "824933781694db3d", "322be26afdb76ad673ee6602f9f7f1f23af10123635538d1275c8f01923e168e", {}),
    "stream": _state(
        *(3, 1, "0d4e515bf167ef27", "dde23c3069fb74f661baa864212d1fc79dad0c1ed2113dda309c20902d32d81b"),
        _OF_LANES,
    ),
    "log": _state(1, 3, "92e1f53a2074dea2", "", {"seed": 0, "mark": _MARK, "vocabulary": _IDS, "dist_type": "{}"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_refuse_them_in_one_line_that_says_how_to_go_on(data: Path, kind: str) -> None:
    loader = make(data, Job(kind=kind))
    fresh = loader.state_dict()
    for state in EARLIER.values():
        version = state["version"]
        message = f"^the loader's state has version {version}, expected 6; go on after it with begin_after, or f"
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
