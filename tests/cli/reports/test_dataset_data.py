import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.cli.reports import dataset_data, dataset_page
from evenrank.dataloader.routing import MODES, KeyMap


@given(
    st.dictionaries(st.integers(0, 999), st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1000, 1100),
    st.integers(1, 20),
)
def test_loads_are_those_of_the_ranges_of_rows(counts_of: dict[int, int], num_embeddings: int, world_size: int) -> None:
    ids, counts = np.array(list(counts_of)), np.array(list(counts_of.values()))
    loads = dataset_data.routing_loads(ids, counts, num_embeddings, ranks=[3, world_size])
    assert loads is not None
    assert (loads.num_embeddings, list(loads.ranks)) == (num_embeddings, [3, world_size])
    assert list(loads.ids) == list(loads.lookups) == list(MODES)
    for mode in MODES:
        key_map = KeyMap(num_embeddings=num_embeddings, world_size=world_size, mode=mode)
        num_ids, num_lookups = [0] * world_size, [0] * world_size
        for key, count in counts_of.items():
            rank = int(key_map(np.array([key]))[0]) // -(-num_embeddings // world_size)
            num_ids[rank] += 1
            num_lookups[rank] += count
        assert loads.ids[mode][1] == pytest.approx(max(num_ids) * world_size / len(ids))
        assert loads.lookups[mode][1] == pytest.approx(max(num_lookups) * world_size / counts.sum())
        assert loads.lookups[mode][1] >= loads.most_frequent[1] * (1 - 1e-12)
    assert loads.most_frequent[1] == pytest.approx(counts.max() * world_size / counts.sum())


def test_a_pattern_of_ids_is_on_few_ranks_unless_hashed() -> None:
    # Every 8th id, all with 7 events, of the first quarter of a table.
    ids = np.arange(0, 1 << 20, 8)
    loads = dataset_data.routing_loads(ids, np.full(len(ids), 7), 1 << 22, ranks=[8, 64])
    assert loads is not None
    assert loads.ids["continuous"] == loads.lookups["continuous"] == [4, 4]
    assert loads.ids["roundrobin"] == loads.lookups["roundrobin"] == [8, 8]
    assert 1 < loads.ids["hash_roundrobin"][0] < loads.ids["hash_roundrobin"][1] < 1.1
    assert loads.lookups["hash_roundrobin"] == pytest.approx(loads.ids["hash_roundrobin"])


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_loads_do_not_depend_on_the_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, counts = np.arange(0, 300, 3), np.arange(1, 101)
    expected = dataset_data.routing_loads(ids, counts, 301)
    monkeypatch.setattr(dataset_data, "_CHUNK", chunk)
    assert dataset_data.routing_loads(ids, counts, 301) == expected


def test_more_ranks_than_rows_leave_ranks_without_any() -> None:
    loads = dataset_data.routing_loads(np.array([0, 1, 4]), np.array([1, 1, 2]), 5, ranks=[8])
    assert loads is not None
    assert {mode: loads.ids[mode][0] for mode in MODES} == pytest.approx(dict.fromkeys(MODES, 8 / 3))
    assert {mode: loads.lookups[mode][0] for mode in MODES} == dict.fromkeys(MODES, 4)


def test_no_events_and_hashed_ids_have_no_loads_and_each_number_of_ranks_is_reported() -> None:
    none, one = np.zeros(0, dtype=np.int64), np.ones(1, dtype=np.int64)
    assert dataset_data.routing_loads(none, none, 31) is None
    assert dataset_data.routing_loads(one, one, (1 << 62) + 1) is None
    seen: list[int] = []
    assert dataset_data.routing_loads(one, one, 1 << 62, on_ranks=seen.append) is not None
    assert seen == [8, 16, 32, 64, 128, 256, 512, 1024]


def test_both_plots_show_all_modes() -> None:
    loads = dataset_data.routing_loads(np.arange(100), np.arange(1, 101), 1000)
    assert loads is not None
    ids, lookups = (dataset_page.routing_svg(loads, load) for load in ("distinct ids", "lookups"))
    assert all(f">{mode}<" in plot for mode in MODES for plot in (ids, lookups))
    assert "most frequent id" in lookups
    assert "most frequent id" not in ids
