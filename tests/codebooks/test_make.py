import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.codebooks import SemanticIdsConfig, make_semantic_ids, read_bundle
from evenrank.core.errors import ConfigError, DataError, StateError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.codes import read_codes
from evenrank.datasets import read_manifest
from tests.cli.programs import evenrank, printed
from tests.codebooks.crafted import make, vectors_of, write_dataset

SMALL: dict[str, Any] = {"levels": 2, "codes": 16}
OPTIONS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["residual-kmeans", "balanced"]),
        "collisions": st.sampled_from(["level", "nearest"]),
        "seed": st.integers(0, 3),
    }
)


@settings(max_examples=6, deadline=None)
@given(OPTIONS, st.lists(st.integers(0, 20), min_size=1, max_size=3), st.integers(0, 1 << 20))
def test_appending_keeps_codes_and_codebooks(options: dict[str, Any], more: list[int], seed: int) -> None:
    """Items get codes once: when they first have a vector, whether they are new or not."""
    rng = np.random.default_rng(seed)
    with TemporaryDirectory() as name:
        folder = Path(name)
        size, vectors, has_vector = 30, vectors_of(100), rng.random(100) < 0.8
        has_vector[:20] = True
        data = write_dataset(folder / "0", vectors[:size] * has_vector[:size, None])
        first, _, before = make(data, folder / "ids0", **SMALL, **options)
        for step, added in enumerate(more, 1):
            size += added
            has_vector |= rng.random(100) < 0.3
            data = write_dataset(folder / f"{step}", vectors[:size] * has_vector[:size, None])
            out = folder / f"ids{step}"
            bundle, report, codes = make(data, out, append=folder / f"ids{step - 1}")
            had_codes = before[:, 0] >= 0
            assert np.array_equal(codes[: len(before)][had_codes], before[had_codes])
            is_coded = codes[1:, 0] >= 0
            assert np.array_equal(is_coded, has_vector[:size])
            assert len({tuple(row) for row in codes[1:][is_coded].tolist()}) == is_coded.sum() == report["items"]
            for name in ("codebooks.npy", "prices.npy"):
                assert (out / name).read_bytes() == (folder / "ids0" / name).read_bytes()
            assert (bundle.codebook_sizes, len(bundle.codes.versions)) == (first.codebook_sizes, step + 1)
            assert bundle.codes.extends(first.codes.version)
            assert read_bundle(out) == bundle
            before = codes


def test_a_bundle_is_read_as_it_was_written_and_the_same_seed_makes_the_same(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", vectors_of(60))
    bundle, report, codes = make(data, tmp_path / "a", **SMALL)
    again, _, same = make(data, tmp_path / "b", **SMALL)
    assert read_bundle(tmp_path / "a") == bundle == again
    assert np.array_equal(codes, same)
    table = read_codes(tmp_path / "a")
    assert np.array_equal(table.codes, codes)
    assert table.codebook_sizes == (16, 16, max(16, 2 * report["largest_group"]))
    assert json.loads((tmp_path / "a" / "report.json").read_text()) == report
    assert {path.name for path in tmp_path.iterdir()} == {"data", "a", "b"}


def test_report_counts_items_and_collisions(tmp_path: Path) -> None:
    vectors = np.array([[0.0, 1], [0, 1], [0, 1], [5, 5], [0, 0], [5, 5], [9, 0]])  # the fifth has none
    _, report, codes = make(write_dataset(tmp_path / "data", vectors), tmp_path / "ids", levels=1, codes=3)
    counts = {"items": 6, "without_code": 1, "coded_now": 6, "collisions": 3, "largest_group": 3, "dead": [0, 3]}
    assert {name: report[name] for name in counts} == counts
    assert codes[:, 1].tolist() == [-1, 0, 1, 2, 0, -1, 1, 0]
    assert report["reconstruction_error"] == 0


def test_nothing_is_left_of_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    data = write_dataset(tmp_path / "data", vectors_of(60))
    monkeypatch.setattr("numpy.save", fails)
    with pytest.raises(DataError, match=r"ids could not be written: No space left on device; choose another --out"):
        make(data, tmp_path / "ids", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_the_last_level_has_room_and_never_grows(tmp_path: Path) -> None:
    vectors = np.repeat(vectors_of(4), 3, axis=0)
    bundle, _, _ = make(write_dataset(tmp_path / "1", vectors), tmp_path / "ids", levels=1, codes=4)
    assert bundle.codebook_sizes == (4, 6)
    more = np.concatenate([vectors, np.repeat(vectors[:1], 4, axis=0)])
    with pytest.raises(ConfigError, match=r"7 items have the same codes, and the last level of .* has 6 codes; make"):
        make(write_dataset(tmp_path / "2", more), tmp_path / "ids2", append=tmp_path / "ids")


@pytest.mark.parametrize(
    ("dataset", "out"), [("{}/data", "."), ("file://{}/data", None), ("file://{}/data", "file://{}/x")]
)
def test_the_folder_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, out: Any
) -> None:
    write_dataset(tmp_path / "data", vectors_of(20))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = SemanticIdsConfig(dataset=dataset.format(tmp_path), out=out and out.format(tmp_path), levels=1, codes=2)
    make_semantic_ids(config)
    (bundle,) = tmp_path.rglob("bundle.json")
    assert bundle.parent == tmp_path / {None: "data-semantic-ids", ".": "here"}.get(out, "x")


DAY = """user,item,time
{rows}"""


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the datasets day1 and day2, which has more items, and their semantic ids."""
    pytest.importorskip("polars")
    folder, rng = tmp_path_factory.mktemp("days"), np.random.default_rng(0)
    for day, items in ((1, 80), (2, 120)):
        events = [
            f"{event // 10},i{rng.integers(items)},{1_500_000_000 + day * 86_400 + event}" for event in range(800)
        ]
        (folder / f"log{day}.csv").write_text(DAY.format(rows="\n".join(events)))
        np.save(folder / f"vectors{day}.npy", vectors_of(items).astype(np.float16))
        (folder / f"vectors{day}.ids.txt").write_text("".join(f"i{item}\n" for item in range(items)))
        vocabulary = ("--vocabulary", folder / "day1") if day == 2 else ("--ids", "item=dense")
        columns = ("--user-column", "user", "--item-column", "item", "--timestamp-column", "time")
        log = ("--dataset", "custom", "--events", folder / f"log{day}.csv", *columns)
        of_day = ("--item-vectors", folder / f"vectors{day}.npy", "--out", folder / f"day{day}")
        printed("preprocess", *log, "--split", "leave-last:1", *vocabulary, *of_day)
    return folder


def test_command_makes_and_appends_codes_that_states_compare(days: Path) -> None:
    assert "collisions: " in printed("semantic-ids", days / "day1", "--codes", 16, "--levels", 2)
    numbers = json.loads(
        printed("semantic-ids", days / "day2", "--append", days / "day1-semantic-ids", "--json"),
    )
    assert numbers["items"] == read_manifest(days / "day2").vocabulary_sizes["item_id"] - 1
    assert numbers["folder"] == str(days / "day2-semantic-ids")
    other = ("--seed", 1, "--method", "balanced", "--collisions", "nearest", "--out", days / "other")
    printed("semantic-ids", days / "day1", "--codes", 16, "--levels", 2, *other)

    def loader(day: int, codes: str) -> Any:
        config = LoaderConfig(codes=days / codes, batch_size=4, max_history_length=5)
        return build_loader(days / f"day{day}", config, rank=0, world_size=1)

    first = loader(1, "day1-semantic-ids")
    next(iter(first))
    state = first.state_dict()
    resumed, following = loader(1, "day1-semantic-ids"), loader(2, "day2-semantic-ids")
    resumed.load_state_dict(state)
    following.begin_after(state)
    assert (resumed.epoch, following.epoch) == (0, 1)
    for load in (loader(1, "other").load_state_dict, loader(1, "other").begin_after):
        with pytest.raises(
            StateError, match=r"semantic_id with the vocabulary .* not extend; pass the folder of codes"
        ):
            load(state)
    loader(1, "day2-semantic-ids").begin_after(state)  # which has the same items, and others
    with pytest.raises(StateError, match="does not extend; pass the folder of codes"):
        loader(2, "day1-semantic-ids").begin_after(following.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("day1", "--append", "day1", "--levels", 2), "--levels 2 applies to commands without --append, not to"),
        (("day1", "--levels", 16, "--codes", 65536), "16 levels of 65536 codes have over 2^62 tuples; choose fewer"),
        (
            ("day1", "--codes", 16385, "--method", "balanced"),
            "balanced levels have at most 16,384 codes, got 16,385; c",
        ),
        (("day1", "--out", "day1"), "day1 exists, and is never replaced; remove it, or choose another --out"),
        (
            ("s3://bucket/day1",),
            "s3://bucket/day1 is a URL, and semantic ids are written to this host; choose a folder",
        ),
        (
            ("day1", "--out", "s3://bucket/ids"),
            "s3://bucket/ids is a URL, and semantic ids are written to this host; ch",
        ),
    ],
)
def test_mistakes_on_the_command_line(days: Path, monkeypatch: Any, arguments: Any, message: str) -> None:
    monkeypatch.chdir(days)
    run = evenrank("semantic-ids", *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
