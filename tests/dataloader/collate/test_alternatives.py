"""Items with several codes: tables, and which code an event gets."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import (
    LoaderConfig,
    Mixture,
    SemanticIdBatch,
    StreamConfig,
    build_loader,
    build_stream_loader,
)
from evenrank.dataloader.balance import BalanceConfig, LinearCost
from evenrank.dataloader.codes import CodeTable, read_codes
from evenrank.datasets import open_store
from tests.dataloader.batch_helpers import rows_of

NUM_ITEMS, LEVELS = 501, 2
# Item i has 1 + i % 3 codes: (i % 8, i // 8), and the same in two further books of 100 codes each.
COUNTS = 1 + np.arange(NUM_ITEMS) % 3
OWN = np.stack([np.arange(NUM_ITEMS) % 8, np.arange(NUM_ITEMS) // 8])
FILE = np.where(np.arange(3) < COUNTS[:, None], OWN[..., None] + 100 * np.arange(3), -1)  # [levels, items, codes]


@pytest.fixture
def table(tmp_path: Path) -> CodeTable:
    np.save(tmp_path / "codes.npy", FILE)
    return read_codes(tmp_path / "codes.npy", (300, 300))


def test_a_file_with_several_codes_per_item_is_read(table: CodeTable, tmp_path: Path) -> None:
    assert table.codes.tolist() == FILE[..., 0].T.tolist()
    assert table.alternatives is not None
    assert table.alternatives.tolist() == FILE[..., 1:].transpose(1, 2, 0).tolist()
    assert read_codes(tmp_path / "codes.npy").codebook_sizes == (208, 263)
    items, codes = table.all_codes()
    assert items.tolist() == np.repeat(np.arange(NUM_ITEMS), COUNTS).tolist()
    assert codes[3:6].tolist() == [[2, 0], [102, 100], [202, 200]]  # of item 2
    without = replace(table, alternatives=None)
    assert without.all_codes()[1].tolist() == table.codes.tolist()
    assert table.describe().startswith("2 levels of 501 items with 2 alternatives, codebook_sizes [300, 300], ")
    others = [without, replace(table, alternatives=table.alternatives[:, ::-1][:, 1:].copy())]
    assert len({one.describe().split()[-1] for one in (table, *others)}) == 3
    np.save(tmp_path / "one.npy", FILE[..., :1])
    assert read_codes(tmp_path / "one.npy", (300, 300)).describe() == without.describe()


@pytest.mark.parametrize(
    ("alternatives", "message"),
    [
        ([[[1, 1]]], r"alternatives must be integers \[items, A, levels\] of 2 items with 2 levels, got int64 \[1, 1"),
        ([[[1.0, 1]], [[1, 1]]], "alternatives must be integers .* got float64"),
        ([[[-1, -1], [1, 1]], [[1, 1], [2, 2]]], "item 0 has a code after a missing one; put -1 last"),
        ([[[1, 1], [-1, -1], [2, 2]], [[1, 1], [2, 2], [3, 3]]], "item 0 has a code after a missing one; put -1 last"),
        ([[[1, 1]], [[-1, 2]]], "item 1 has codes in some levels only"),
        ([[[1, 1]], [[1, 4]]], r"below codebook_sizes, \[4, 4\], got 0 to \[1, 4\] in the levels"),
        ([[[1, 1], [2, 2]], [[1, 2], [1, 2]]], "item 1 has the same code twice; set the second to -1"),
        ([[[1, 1]], [[0, 1]]], "item 1 has the same code twice; set the second to -1"),
    ],
)
def test_malformed_alternatives_are_refused(alternatives: Any, message: str, tmp_path: Path) -> None:
    codes = np.array([[0, 0], [0, 1]], dtype=np.int32)
    with pytest.raises(ConfigError, match=message):
        CodeTable(codes=codes, codebook_sizes=(4, 4), alternatives=np.array(alternatives))
    if np.array(alternatives).dtype.kind == "i" and len(alternatives) == 2:
        whole = np.concatenate([codes[:, None], np.array(alternatives)], axis=1)
        np.save(tmp_path / "codes.npy", whole.transpose(2, 0, 1))
        with pytest.raises(DataError, match=message):
            read_codes(tmp_path / "codes.npy", (4, 4))


def test_an_item_without_a_code_has_no_alternatives() -> None:
    codes = np.array([[0, 0], [-1, -1]], dtype=np.int32)
    with pytest.raises(ConfigError, match=r"^item 1 has a code after a missing one; put -1 last$"):
        CodeTable(codes=codes, codebook_sizes=(4, 4), alternatives=np.array([[[1, 1]], [[2, 2]]]))


def _config(table: CodeTable, **options: Any) -> LoaderConfig:
    settings: dict[str, Any] = {"max_history_length": 6, "draw_alternatives": True}
    return LoaderConfig(batch_size=8, codes=table, **settings | options)


def _rows(batches: Any) -> dict[int, tuple[list[int], ...]]:
    """Return tokens and labels of each sample by its id, each sample once."""
    rows: dict[int, tuple[list[int], ...]] = {}
    for batch in batches:
        assert isinstance(batch, SemanticIdBatch)
        keys = ("semantic_id", *(["candidate_id"] if "candidate_id" in batch.features.keys() else []))  # noqa: SIM118
        columns = [*(rows_of(batch.features, key) for key in keys), rows_of(batch.labels, "label")]
        for row, sample in enumerate(batch.sample_ids[: batch.num_real].tolist()):
            assert sample not in rows
            rows[sample] = tuple(column[row] for column in columns)
    return rows


def _epoch(dataset: Path, table: CodeTable, world_size: int = 1, skip: int = 0, **options: Any) -> Any:
    loaders = [
        build_loader(dataset, _config(table, **options), rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for loader in loaders:
        for _ in range(skip):
            list(loader)
    return _rows(batch for loader in loaders for batch in loader)


def test_an_event_gets_one_of_its_items_codes_in_its_features_and_labels(small_dataset: Path, table: CodeTable) -> None:
    store = open_store(small_dataset)
    options = {"history_labels": True, "candidate_feature": True, "label_offsets": True}
    drawn: Counter[tuple[int, int]] = Counter()
    for sample, (history, candidate, labels) in _epoch(small_dataset, table, **options).items():
        items = store.columns["item_id"][store.offsets[sample] : store.offsets[sample + 1]][-7:]
        assert labels == [*history, *candidate][LEVELS if history else 0 :]
        tokens = np.array([*history, *candidate]).reshape(-1, LEVELS) - [0, 300]
        for item, code in zip(items.tolist(), tokens.tolist(), strict=True):
            book, rest = divmod(code[0], 100)
            assert code == [item % 8 + 100 * book, item // 8 + 100 * book]
            assert (rest, book < COUNTS[item]) == (item % 8, True)
            drawn[int(COUNTS[item]), book] += 1
    for count in (2, 3):
        of_count = np.array([drawn[count, book] for book in range(count)])
        assert of_count / of_count.sum() == pytest.approx(np.full(count, 1 / count), abs=5 / np.sqrt(of_count.sum()))
    # Without the option, as in evaluation, all have the first code.
    for history, labels in _epoch(small_dataset, table, draw_alternatives=False).values():
        assert max(history[::2], default=0) < 100 > labels[0]
    assert _epoch(small_dataset, replace(table, alternatives=None)) == _epoch(
        small_dataset, table, draw_alternatives=False
    )


def test_draws_depend_on_the_seed_the_epoch_and_the_sample_alone(small_dataset: Path, table: CodeTable) -> None:
    options = {"history_labels": True, "seed": 3}
    expected = [_epoch(small_dataset, table, skip=epoch, **options) for epoch in (0, 1)]
    assert expected[0].keys() == expected[1].keys()
    same = np.mean([expected[0][sample] == expected[1][sample] for sample in expected[0]])
    assert same < 0.2  # short histories of items with one code
    assert _epoch(small_dataset, table, **options | {"seed": 4}) != expected[0]
    for world_size, more in ((3, {}), (2, {"num_workers": 2, "prefetch": 3}), (1, {"order": "rows"})):
        assert _epoch(small_dataset, table, world_size, skip=1, **options | more) == expected[1]
    # Of another length of histories, those that both show are the same: draws count from the end of the sample.
    for sample, (history, labels) in _epoch(small_dataset, table, **options | {"max_history_length": 2}).items():
        assert history == expected[0][sample][0][len(expected[0][sample][0]) - len(history) :]
        assert labels == expected[0][sample][1][len(expected[0][sample][1]) - len(labels) :]
    streams = [
        build_stream_loader(
            small_dataset, _config(table, **options), StreamConfig(lanes=6, window_rows=7), rank=rank, world_size=2
        )
        for rank in range(2)
    ]
    assert _rows(batch for stream in streams for batch in stream) == expected[0]
    balance = BalanceConfig(cost=LinearCost(history_key="semantic_id", interleave_actions=False))
    loader = build_loader(small_dataset, _config(table, **options), rank=0, world_size=1, balance=balance)
    assert _rows(loader) == expected[0]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_resumed_epoch_draws_what_it_would_have_drawn(small_dataset: Path, table: CodeTable, num_steps: int) -> None:
    def make(world_size: int, seed: int = 0) -> Any:
        config = _config(table, history_labels=True, seed=seed)
        return [build_loader(small_dataset, config, rank=rank, world_size=world_size) for rank in range(world_size)]

    expected = _epoch(small_dataset, table, skip=1, history_labels=True)
    stopped = make(2)
    for loader in stopped:
        list(loader)
    iterators = [iter(loader) for loader in stopped]
    seen = _rows([next(iterator) for _ in range(num_steps) for iterator in iterators])
    resumed = make(3, seed=9)  # the state has the seed
    for loader in resumed:
        loader.load_state_dict(stopped[0].state_dict())
    seen |= _rows(batch for loader in resumed for batch in loader)
    assert seen == expected


def test_a_batch_is_collated_again_by_its_epoch(small_dataset: Path, table: CodeTable) -> None:
    loader = build_loader(Mixture(weights={small_dataset: 1.0}), _config(table), rank=0, world_size=1)
    list(loader)
    for batch in loader:
        ids: NDArray[np.int64] = batch.sample_ids[: batch.num_real].numpy()
        again = loader.collate(ids, epoch=1)
        assert rows_of(again.labels, "label") == rows_of(batch.labels, "label")[: batch.num_real]
