"""Mistakes in what loaders are given: settings, columns, tables of codes, samples, key maps and states."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader

from evenrank.core.errors import ConfigError, DataError, EvenrankError, StateError
from evenrank.dataloader import (
    CodeTable,
    ElasticLoader,
    ElasticSampler,
    JaggedCollate,
    LoaderConfig,
    LossKey,
    Mixture,
    Negatives,
    Pools,
    RandomBatches,
    RandomData,
    Replay,
    Requests,
    StochasticLength,
    StreamConfig,
    TimeWindows,
    VectorLookup,
    build_loader,
    build_stream_loader,
    dense,
    jagged,
)
from evenrank.dataloader.balance import BalanceConfig
from evenrank.dataloader.batches.padding import PaddedBatches
from evenrank.dataloader.codes import read_codes
from evenrank.dataloader.collate.collate import Collate
from evenrank.dataloader.collate.negatives import NegativeSampler
from evenrank.dataloader.routing import KeyMap, check_dist_type, dist_type, map_features, read_dist_type, remap
from evenrank.dataloader.state.checks import decode, encode
from evenrank.datasets import FolderLog, open_store
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.costs import COST, item_tokens
from tests.dataloader.collate.stores import STORE, store_of_items
from tests.dataloader.rich_batch import rich_batch
from tests.datasets.crafted import change_table, copy_dataset, set_columns, update_manifest
from tests.datasets.logs import MANIFEST
from tests.datasets.test_vectors import add_vectors
from tests.errors.scene import Row, Scene

Case = tuple[Callable[[Scene], Any], str]
ONE: dict[str, Any] = {"rank": 0, "world_size": 1}
CODES = CodeTable(codes=np.zeros((501, 2), dtype=np.int32), codebook_sizes=(1, 1))
OTHER_CODES = replace(CODES, codes=CODES.codes + np.ones(2, dtype=np.int32), codebook_sizes=(2, 2))
WINDOWS = TimeWindows(every="1d")
MAP = KeyMap(num_embeddings=9, world_size=2, mode="roundrobin")
HASHED = KeyMap(num_embeddings=100, world_size=4, mode="hash_roundrobin")


def _rows(kind: type[EvenrankError], *cases: Case) -> list[Row]:
    return [Row(call, kind, line) for call, line in cases]


def _config(**options: Any) -> LoaderConfig:
    return LoaderConfig(**{"batch_size": 4, **options})


def _loader(data: Any, **options: Any) -> Any:
    return build_loader(data, _config(**options), **ONE)


def _stream(data: Any, follow: bool = False, **options: Any) -> Any:
    build: Any = build_stream_loader
    return build(data, _config(**options), **ONE, follow=follow)


NEW_ITEMS, COUNTED_BEFORE = Negatives(count=1, known_at=True), Negatives(count=1, by="popularity", counted="before")
OF_EVENTS = {"extra_events": ("timestamp_ms",), "label": "action", "weight": "price", "negatives": Negatives(count=1)}
NOT_WITH_CODES: dict[str, Any] = {"num_tasks": 1, "candidate_actions": True, **OF_EVENTS}
OF_SETTINGS = _rows(
    ConfigError,
    (lambda s: _config(batch_size=0), "LoaderConfig: batch_size must be at least 1, got 0"),
    (lambda s: _config(seed=1 << 63), "LoaderConfig: seed must be at least -2^63 and below 2^63, got ..."),
    (lambda s: _config(key_maps=MAP), "LoaderConfig: key_maps must be of type Mapping[str, KeyMap], got KeyMap(..."),
    (lambda s: _config(key_maps={"action": MAP}), "key_maps cannot have 'action': actions are labels too, and ..."),
    (lambda s: _config(key_maps={"item_id": MAP}, codes=CODES), "key_maps cannot have 'item_id' with codes, which ..."),
    (lambda s: _config(codes=CODES, max_num_candidates=2), "semantic ids have one target each, the last event, ..."),
    *(
        (lambda s, n=name, v=value: _config(codes=CODES, **{n: v}), f"LoaderConfig: {name}=... applies to ...")
        for name, value in NOT_WITH_CODES.items()
    ),
    *(
        (lambda s, n=name: _config(**{n: (1,) if "size" in n else True}), f"LoaderConfig: {name}=... has no effect...")
        for name in ("codebook_sizes", "label_offsets", "history_labels", "candidate_feature", "draw_alternatives")
    ),
    (lambda s: _config(order=WINDOWS), "windows of time have candidates as targets; pass max_num_candidates of ..."),
    (lambda s: _config(order=Requests()), "requests have candidates as targets; pass max_num_candidates of at least 1"),
    (lambda s: _config(num_tasks=2, label="dwell"), "num_tasks above 1 are bits of actions, got label 'dwell'; ..."),
    (lambda s: _config(num_tasks=1, negatives=Negatives(count=1)), "negatives are ...; set max_num_candidates to 1"),
    (lambda s: _config(negatives=COUNTED_BEFORE), "counted='before' is before a window of time, got order ..."),
    (lambda s: Negatives(count=1, counted="before"), "Negatives: counted='before' applies to by='popularity', not..."),
    (lambda s: Negatives(count=0), "Negatives: count must be at least 1, got 0"),
    (lambda s: Negatives(count=1, by="events"), "Negatives: by must be one of uniform, ..."),  # type: ignore[arg-type]
    (lambda s: Negatives(count=1, num_hard=2), "Negatives: num_hard=2 has no effect without hard; give both, or ..."),
    (lambda s: StochasticLength(alpha=0.5), "StochasticLength: alpha must be at least 1 and at most 2, got 0.5"),
    *(
        (
            lambda s, k=newest, n=longest: _config(
                max_history_length=n, stochastic_length=StochasticLength(alpha=1.5, newest=k)
            ),
            f"stochastic_length keeps the newest {newest} events, but cuts histories to {cut}; lower ...",
        )
        for newest, longest, cut in ((23, 64, 22), (1, 0, 0))
    ),
    (lambda s: _config(pools=Pools(values=(1,)), key_maps={"action": MAP}), "key_maps cannot have 'action': ..."),
    (lambda s: _config(pools=Pools(values=(1,), column="x"), key_maps={"x": MAP}), "pools do not go with a key ..."),
    (lambda s: StreamConfig(poll_seconds=0), "StreamConfig: poll_seconds must be above 0 and finite, got 0"),
    (lambda s: Mixture(weights={}), "Mixture: weights must be of at least one dataset, as {folder: weight}, got {}"),
    (lambda s: _config(device="cuda:0", pin_memory=True), "batches are handed out on device='cuda:0', so nothing ..."),
    (lambda s: _config(pad_tokens_to=0), "LoaderConfig: pad_tokens_to must be a number above 0, or a ..., got 0"),
    (lambda s: _config(pad_tokens_to=(8, 8)), "LoaderConfig: pad_tokens_to must be ... that rise, got (8, 8)"),
    (lambda s: JaggedCollate({}, pad_tokens_to=()), "JaggedCollate: pad_tokens_to must be ..., got ()"),
    (lambda s: next(iter(_loader(s.data, pad_tokens_to=(8,)))), "a rank has ... values of item_id, but the largest "
     "total of pad_tokens_to is 8; add a larger one, or pass max_tokens_per_rank or a smaller batch_size"),
    (lambda s: _loader(STORE, device="gpu"), "device is 'gpu', which PyTorch does not know..."),
    (lambda s: _loader(STORE, device="meta"), "device is meta; batches can be on cpu or cuda..."),
    (lambda s: RandomData(contextual={"item_id": Uniform(low=1, high=2)}), "no feature can be called 'item_id'..."),
)  # fmt: skip


def _saved(scene: Scene, table: Any, sizes: Any = None) -> Any:
    """Read a table of codes from a file."""
    np.save(scene.folder / "codes.npy", np.array(table))
    return read_codes(scene.folder / "codes.npy", sizes)


def _table(codes: Any, alternatives: Any = None, sizes: Any = (4, 4)) -> CodeTable:
    more = None if alternatives is None else np.array(alternatives)
    return CodeTable(codes=np.array(codes), codebook_sizes=sizes, alternatives=more)


OF_CODES = [
    *_rows(
        DataError,
        (lambda s: _saved(s, [1, 2]), "<folder>/codes.npy must contain an integer tensor [levels, items] or ..., ..."),
        (lambda s: _saved(s, np.zeros((65, 3), int)), "... has 65 levels of 3 items, more than 64 levels; ..."),
        (lambda s: _saved(s, [[-2]]), "... has codes from -2 to -2; they must be -1 (no code) or 0 to 2^31-1"),
        (lambda s: _saved(s, [[1], [2]], (4,)), "... has 2 levels of 1 items, but codebook_sizes are [4]; pass ..."),
        (lambda s: _saved(s, [[1, -1], [1, 1]]), "<folder>/codes.npy: item 1 has codes in some levels only; set ..."),
        (lambda s: _saved(s, [[[1, 1]], [[2, 2]]]), "<folder>/codes.npy: item 0 has the same code twice; set the ..."),
        (lambda s: read_codes(s.file("codes.csv", "")), "<folder>/codes.csv must be a .pt file from torch.save or ..."),
    ),
    *_rows(
        ConfigError,
        (lambda s: _table([[0, 0]], sizes=(2, 3, 4)), "codes must be integers ..., got int64 [1, 2]; transpose a ..."),
        (lambda s: _table([[0.5, 0]]), "codes must be integers [items, levels] with one of codebook_sizes, ..., ..."),
        (lambda s: _table([[0, 1], [3, 4]]), "codes must be -1 (no code) or below codebook_sizes, [4, 4], got 0 ..."),
        (lambda s: _table([[0, 0], [0, 1]], [[[1, 1]]]), "alternatives must be integers [items, A, levels] of 2 ..."),
        (lambda s: _table([[0, 0]], [[[-1, -1], [1, 1]]]), "item 0 has a code after a missing one; put -1 last"),
        (lambda s: _table([[0, 0], [1, 1]], [[[2, 2]], [[-1, 2]]]), "item 1 has codes in some levels only; ..."),
        (lambda s: _table([[0, 0]], [[[1, 4]]]), "codes must be ..., got 0 to [1, 4] in the levels; give each ..."),
    ),
]  # fmt: skip


def _hard(scene: Scene, table: Any) -> Any:
    """Read hard negatives, of which a dataset of 9 items has a file."""
    path = scene.file("hard.parquet", b"PAR1")
    if table:
        pq.write_table(pa.table(table), path)
    return NegativeSampler.create(Negatives(count=1, hard=path, num_hard=1), [store_of_items([], size=9)], None)


NO_SETS = {"user_id": pa.array([], pa.int64()), "candidates": pa.array([], pa.list_(pa.int64()))}


def _sets(scene: Scene, table: Any) -> Any:
    """Read candidate sets for a dataset of 9 items."""
    path = scene.folder / "sets.parquet"
    pq.write_table(pa.table(table), path)
    config = LoaderConfig(batch_size=1, max_num_candidates=1, candidate_sets=path)
    return Collate.create(config, STORE.manifest, [store_of_items([], size=9)])


def _known(source: Any, **options: Any) -> Any:
    return NegativeSampler.create(Negatives(count=1, known_at=True, **options), [source], None)


def _popular(size: int, rule: str) -> Any:
    return NegativeSampler.create(Negatives(count=1, by="popularity"), [store_of_items([], size=size, rule=rule)], None)


def _mapped(scene: Scene) -> Any:
    return open_store(scene.data).remapped({"item_id": replace(MAP, num_embeddings=503)})


def _columns(**options: Any) -> Any:
    events = {"dwell": "int32", "price": "float32", "bid": "float32?"}
    manifest = replace(STORE.manifest, contextual={"age": "int64", "share": "float32"}, extra_events=events)
    return Collate.create(_config(**options), manifest)


OF_COLUMNS = [
    *_rows(
        ConfigError,
        (lambda s: _columns(context=("age", "sex")), "the dataset has no contextual feature 'sex'; known: age, ..."),
        (lambda s: _columns(extra_events=("share",)), "the dataset has no extra events 'share'; known: ..."),
        (lambda s: _columns(label=("dwell", "cost")), "the dataset has no column of events for label 'cost'; ..."),
        (lambda s: _columns(label=("dwell", "action")), "label can be one column of integers and one of floats, ..."),
        (lambda s: _columns(weight="age"), "the dataset has no events or float feature for weight 'age'; known: ..."),
        (lambda s: _columns(weight="bid"), "weight 'bid' may be missing in the dataset; declare it with =FILL or ..."),
        (lambda s: _loader(s.data, key_maps={"video_id": MAP}), "key_maps has 'video_id', which is no feature of ..."),
        (lambda s: _loader(s.data, key_maps={"item_id": MAP}), "item_id is up to 496 in the dataset, too large ..."),
        (lambda s: _loader(_mapped(s), negatives=Negatives(count=1)), "negatives are drawn before items are ..."),
        (lambda s: RandomBatches(_config(negatives=Negatives(count=1)), num_batches=1), "random batches have no ..."),
        (lambda s: _stream(s.data, negatives=Negatives(count=1)), "...rule 'keep', whose events a stream cannot ..."),
        (lambda s: _known(store_of_items([[1]], size=9)), "known_at needs the times of the events of train, and ..."),
        (lambda s: _known(store_of_items([], size=9)), "known_at needs the times of the events of train, and ..."),
        (lambda s: _stream(s.data, negatives=NEW_ITEMS), "streams and logs do not know when items came first; use ..."),
        (lambda s: RandomBatches(_config(candidate_sets="a"), num_batches=1), "random batches have no users with ..."),
        (lambda s: _popular(1 << 62, "hash:4611686018427387904"), "negatives need tables of all ..."),
    ),
    *_rows(
        DataError,
        (lambda s: _hard(s, None), "<folder>/hard.parquet is no Parquet file of hard negatives (...); write ..."),
        (lambda s: _hard(s, {"item_id": [1], "negatives": [[None]]}), "...; write item_id int64 and negatives ..."),
        (lambda s: _hard(s, {"item_id": [1, 1], "negatives": [[2], [3]]}), "... has item_id 1 in more than one ..."),
        (lambda s: _hard(s, {"item_id": [9], "negatives": [[1]]}), "... has items 9 to 9, the dataset 0 to 8; ..."),
        (lambda s: _sets(s, NO_SETS), "<folder>/sets.parquet has no candidate sets; write a row for each user"),
        (lambda s: _sets(s, {"user_id": [1]}), "<folder>/sets.parquet is no Parquet file of candidate sets (...); ..."),
        (lambda s: _sets(s, {"user_id": [None, 1], "candidates": [[1], [1]]}), "...; write user_id int64 and ..."),
        (lambda s: _sets(s, {"user_id": [1], "candidates": [None]}), "...; write user_id int64 and candidates list..."),
        (lambda s: _sets(s, {"user_id": [2, 1, 2], "candidates": [[1]] * 3}), "... has user_id 2 in more than one ..."),
        (lambda s: _sets(s, {"user_id": [2], "candidates": [[-1]]}), "... has items -1 to -1, the dataset 0 to 8; ..."),
        (lambda s: _hard(s, {"item_id": [1], "negatives": [[9]]}), "... has items 9 to 9, the dataset 0 to 8; ..."),
    ),
]  # fmt: skip


def _of_negative_users(scene: Scene) -> Any:
    data = copy_dataset(scene.data, scene.folder / "data")
    change_table(data, lambda table: set_columns({"user_id": pa.array(range(-len(table), 0))})(table))
    return data


def _without_context(scene: Scene) -> Any:
    other = copy_dataset(scene.data, scene.folder / "other")
    update_manifest(other, contextual={})
    return Mixture(weights={scene.data: 1, other: 1})


def _log(scene: Scene, **options: Any) -> Any:
    return _stream(FolderLog(scene.folder, MANIFEST), **options)


def _random(**options: Any) -> Any:
    config = _config(**options.pop("config", {}))
    return RandomBatches(config, **{"num_batches": 1, **options})


def _keep(batch: Any, rng: Any) -> Any:
    return batch


def _forget(batch: Any, rng: Any) -> Any:
    return None


LARGE_ACTIONS = RandomData(actions=Uniform(low=1 << 31, high=1 << 32))
OF_DATA = [
    *_rows(
        ConfigError,
        (lambda s: build_loader(s.data, _config(), rank=2, world_size=2), "rank must be between 0 and world_size ..."),
        (lambda s: _loader(s.data).num_windows, "order 'shuffle' has no windows of time; pass TimeWindows(every='1d')"),
        (lambda s: _loader(Mixture(weights={s.data: 1}), order="rows"), "mixtures are always shuffled; order ..."),
        (lambda s: _loader(open_store(s.data), order=Requests(), max_num_candidates=1),
         "requests are of all splits of a dataset, not of ...; pass its folder or URL"),
        (lambda s: build_loader(s.data, _config(), **ONE, balance=BalanceConfig(cost=COST), transform=_keep),
         "balance plans from the lengths in the store, which a transform may change; leave out transform ..."),
        (lambda s: next(iter(build_loader(s.data, _config(), **ONE, transform=_forget))),
         "the transform returned a NoneType; return the batch to yield"),
        (lambda s: _loader(s.data).begin_at(-1), "the epoch must be at least 0 and below 2^31, got -1"),
        (lambda s: _loader(s.data).begin_at("1"), "the epoch must be of type int, got '1'"),
        (lambda s: _log(s, order="rows", follow=True).begin_at(1), "a log has no epochs; load_state_dict a state..."),
        (lambda s: next(iter(Replay(_loader(s.data)))), "... no request_ts_ms; make their loader with ..."),
        (lambda s: Replay([], speed=float("nan")), "Replay: speed must be above 0 and finite, got nan"),
        (lambda s: _stream(s.data, order="rows"), "streams are always shuffled; order must be 'shuffle', got 'rows'"),
        (lambda s: _log(s, follow=True), "a log is read in its order; order must be 'rows', got 'shuffle'"),
        (lambda s: _log(s, order="rows"), "a log is read as it grows; pass follow=True"),
        (lambda s: _random(config={"order": Requests(), "max_num_candidates": 1}), "random batches have no times ..."),
        (lambda s: _random(data=LARGE_ACTIONS).batch(0), "actions must be between 0 and 2147483647, got ..."),
    ),
    *_rows(
        DataError,
        (lambda s: _loader(_without_context(s)), "... and ... differ in length limit of segment: ...; features: ..."),
        (lambda s: _loader(_of_negative_users(s), user_id=True), "... but <folder>/data has user -...; number ..."),
        (lambda s: list(_stream(_of_negative_users(s), user_id=True)), "... the dataset has user -...; number ..."),
        (lambda s: _stream(s.folder), "<folder> is not a dataset: it contains no manifest..."),
    ),
]  # fmt: skip

LENGTHS = {"item_id": np.arange(9)}
BALANCE = BalanceConfig(cost=item_tokens)


def _sampler(**options: Any) -> Any:
    return ElasticSampler(9, **{"batch_size": 4, "rank": 0, "world_size": 2, **options})


def _elastic(collate: Any = None, samples: Any = range(9), **options: Any) -> Any:
    return ElasticLoader(DataLoader(samples, batch_sampler=_sampler(**options), collate_fn=collate))


LOSS_KEY = LossKey("features", "item_id")
OF_ITEMS = JaggedCollate({"item_id": jagged()})


def _collate_items(samples: Any) -> Any:
    return OF_ITEMS([{"item_id": [1] * sample} for sample in samples])


def _collate_but_one(samples: Any) -> Any:
    return _collate_items(samples[1:])


OF_SAMPLERS = _rows(
    ConfigError,
    (lambda s: _sampler(rank=2), "rank must be between 0 and world_size - 1, got rank 2 of 2; ..."),
    (lambda s: _sampler(balance=BALANCE), "lengths and balance belong together..."),
    (lambda s: _sampler(balance=BALANCE, lengths={"item_id": -LENGTHS["item_id"]}), "...must not be negative, ..."),
    (lambda s: _sampler(balance=BALANCE, lengths={"item_id": np.arange(7)}), "lengths['item_id'] must be ..."),
    (lambda s: _sampler(balance=BALANCE, lengths=LENGTHS, loss_key=LossKey("labels", "label")), "... has no ..."),
    (lambda s: _elastic(samples=range(10)), "the dataset has 10 samples, its ElasticSampler 9..."),
    (lambda s: ElasticLoader(DataLoader([1, 2])), "the loader has a BatchSampler; pass ..."),  # type: ignore[arg-type]
    (lambda s: next(iter(_elastic(_collate_but_one))), "collate_fn made 3 rows of 4 samples..."),
    (lambda s: next(iter(_elastic(_collate_items, balance=BALANCE, lengths=LENGTHS, loss_key=LOSS_KEY))),
     "the batch has loss_key None, its ElasticSampler LossKey(..."),
)  # fmt: skip

DECLARED = {"a": jagged(), "b": dense(), "c": jagged(torch.int32, field="narrow"), "d": dense(dtype=torch.int64)}


def _collate(sample: Any, *names: str) -> Any:
    collate = JaggedCollate({name: DECLARED[name] for name in (names or ("a", "b"))})
    return collate([{"a": [], "b": 1, "c": [2**31 - 1], "d": 0}, sample])


OF_SAMPLES = [
    *_rows(
        ConfigError,
        (lambda s: JaggedCollate({"a": "jagged"}), "'a' must be jagged() or dense(), ..."),
        (lambda s: JaggedCollate({"step": dense()}), "a batch cannot have a tensor called 'step'; rename it"),
        (lambda s: JaggedCollate({"class": dense()}), "a batch cannot have a tensor called 'class'; rename it"),
        (lambda s: JaggedCollate({"features": dense(), "a": jagged()}), "'features' is declared as dense and as ..."),
        (lambda s: JaggedCollate({"a": jagged(), "b": jagged(torch.float32)}), "'b' is torch.float32, but 'a' of ..."),
        (lambda s: JaggedCollate({"a": jagged(torch.bfloat16)}), "'a' cannot be jagged..."),
        (lambda s: JaggedCollate({"a": jagged()}, loss_key=LossKey("features", "b")), "... no LossKey(...; its ..."),
        (lambda s: JaggedCollate({"a": jagged()}, loss_key=("features", "a")), "the ..."),  # type: ignore[arg-type]
        (lambda s: list(PaddedBatches([], batch_size=2, collate=JaggedCollate({"y": dense()}), num_batches=1)),
         "a batch without samples needs dense(dtype=..., shape=...) of 'y'; de..."),
    ),
    *_rows(
        DataError,
        (lambda s: _collate({"a": [2**63], "b": 1}), "sample 1 of a batch has 'a' of dtype uint64 with values ..."),
        (lambda s: _collate({"a": [[1], [1, 2]], "b": 1}), "sample 1 of a batch has 'a' of type list that is no ..."),
        (lambda s: _collate({"a": [1], "b": None}), "sample 1 of a batch has 'b' of type NoneType that is no ..."),
        (lambda s: _collate({"a": [1]}), "sample 1 of a batch has no 'b': it has a; samples must be dicts with ..."),
        (lambda s: _collate([1, 2]), "sample 1 of a batch has no 'a': it is a <class 'list'>; samples must be ..."),
        (lambda s: _collate({"a": [[1]], "b": 1}), "sample 1 of a batch has 'a' of shape (1, 1); jagged values ..."),
        (lambda s: _collate({"a": [1], "b": [1, 2]}), "sample 1 of a batch has 'b' of shape (2,) and torch.int64..."),
        (lambda s: _collate({"c": [2**31]}, "c"), "sample 1 of a batch has 'c' of dtype int64 with values that do ..."),
        (lambda s: _collate({"d": 0.7}, "d"), "sample 1 of a batch has 'd' of dtype float64 with values that do ..."),
        (lambda s: JaggedCollate({"a": jagged(max_length=3)})([{"a": [1] * 4}]), "sample 0 of a batch has 4 ..."),
    ),
]  # fmt: skip


def _map(**changes: Any) -> KeyMap:
    return KeyMap(**{"num_embeddings": 9, "world_size": 2, "mode": "roundrobin", **changes})


FEATURES = rich_batch([[(1, 2), (0, 3)]]).first  # keys a and b
OF_ROUTING = [
    *_rows(
        ConfigError,
        (lambda s: _map(mode="modulo"), "KeyMap: mode must be one of continuous, roundrobin, ..."),
        (lambda s: _map(num_embeddings=0), "KeyMap: num_embeddings must be at least 1 and at most 2^62, got 0"),
        (lambda s: replace(HASHED, num_embeddings=1 << 33)(np.array([3], np.int32)), "... can be larger than ..."),
        *(
            (lambda s, k=keys: MAP(k), "keys must be ...integers..., got ...")
            for keys in (np.array([3.0]), torch.tensor([True]), torch.tensor([3], dtype=torch.uint64), np.int64(3), [3])
        ),
        (lambda s: map_features(FEATURES, {"c": HASHED}), "key_maps has 'c', which is no feature; there are a, b"),
        (lambda s: remap(torch.zeros(5, 2), MAP, None), "before is for num_embeddings=9, the table has the shape ..."),
    ),
    *_rows(
        DataError,
        (lambda s: MAP(np.array([3, -1])), "the keys of a table with num_embeddings=9 are 0 to 8, got -1; set..."),
        (lambda s: HASHED.inverse(np.array([1 << 40])), "the rows of a table with num_embeddings=100 are 0 to ..."),
        (lambda s: map_features(FEATURES, {"a": replace(HASHED, num_embeddings=1), "b": MAP}), "the keys of a ..."),
    ),
    *_rows(
        StateError,
        (lambda s: check_dist_type(dist_type({"item_id": MAP}), {}, source="the checkpoint step-7"),
         "the checkpoint step-7 stores item_id with routing roundrobin (num_embeddings 9, world_size 2), but this job "
         "uses continuous; use the same key_maps, or change its tables with evenrank.dataloader.routing.remap"),
        (lambda s: check_dist_type(None, {"item_id": HASHED}, source="it"),
         "it stores item_id with routing continuous, but this job uses hash_roundrobin (..."),
        *(
            (lambda s, t=text: check_dist_type(t, {}, source="it"), "it has a damaged dist_type; load an intact one")
            for text in ("x", "[]", "3", '{"item_id": 3}', "[" * 100_000)
        ),
        *(
            (lambda s, c=change: read_dist_type(json.dumps({"item_id": {**MAP.describe(), **c}}), source="it"),
             "it has a damaged dist_type (...")
            for change in ({"mode": "best"}, {"num_embeddings": None}, {"num_embeddings": 0})
        ),
    ),
]  # fmt: skip


def _load(scene: Scene, **changes: Any) -> Any:
    loader = _loader(scene.data)
    loader.load_state_dict({**loader.state_dict(), **changes})


def _load_into(scene: Scene, config: dict[str, Any], **other: Any) -> Any:
    """Load a state where other settings are."""
    _loader(scene.data, **other).load_state_dict(_loader(scene.data, **config).state_dict())


def _lookup(scene: Scene, **options: Any) -> Any:
    add_vectors(folder := copy_dataset(scene.data, scene.folder / "with"))
    return VectorLookup(folder, **options)


OF_VECTORS = _rows(
    ConfigError,
    (lambda s: _lookup(s, key_map=MAP), "key_map has 9 rows, fewer than the 497 ids of item_id; make it larger"),
    (lambda s: _lookup(s, device="meta"), "a table of vectors cannot be on device 'meta', where it has no values; ..."),
    (lambda s: _lookup(s, device="cpu", on_host=True), "on_host=True has no table on a device; leave device='cpu' out"),
)  # fmt: skip
OF_WEEKS = {"order": TimeWindows(every="1w"), "max_num_candidates": 1}
OF_STATES = _rows(
    StateError,
    (lambda s: _load(s, epoch=True), "the state of the loader: epoch must be of type int, got True; load a state ..."),
    (lambda s: _load(s, seed=1 << 70), "the state of the loader: seed must be at least -2^63 and below 2^63, got ..."),
    (lambda s: _load(s, position=10**5000), "the state of the loader: position must be ..., got an integer of ..."),
    (lambda s: _load(s, more=1), "the state of the loader has the unknown entry 'more'; load a state that ..."),
    (lambda s: _load(s, position=64), "the state of the loader is damaged: its checksum is not that of its ..."),
    (lambda s: _loader(s.data).load_state_dict({"opt": 2}), "the state of the loader has no version, only 'opt'; ..."),
    (lambda s: _load(s, version=2), "the state of the loader has version 2, expected 6; load it with the version ..."),
    (lambda s: _loader(s.data).load_state_dict(5), "the state of the loader must be a mapping, got 5; load a ..."),
    (lambda s: _load_into(s, {}, max_num_candidates=3), "the loader's state is of other data, codes or filters: ..."),
    (lambda s: _load_into(s, {"codes": CODES}, codes=OTHER_CODES), "the loader's state is of other data, codes or ..."),
    (lambda s: _load_into(s, OF_WEEKS, **{**OF_WEEKS, "order": WINDOWS}), "the loader's state is of other data..."),
    (lambda s: _load_into(s, {}, key_maps={"segment": MAP}), "the loader's state stores segment with routing ..."),
    (lambda s: decode(encode(Row)), "the loader's part of the state contains tests.errors.scene.Row, which is not ..."),
)  # fmt: skip

ROWS = [*OF_VECTORS, *OF_STATES, *OF_SETTINGS, *OF_CODES, *OF_COLUMNS, *OF_DATA, *OF_SAMPLERS, *OF_SAMPLES, *OF_ROUTING]
