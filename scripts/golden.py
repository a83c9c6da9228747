"""The golden run: what the package makes of small data, by hash, to show that a change of its code changes no output.

    python scripts/golden.py record before.json --package CHECKOUT     # of the commit before
    python scripts/golden.py compare before.json                       # prints the names of results that differ

Results have names such as `batches/stored/shuffle/plain/world 3/step 7`. They belong to one machine and its libraries,
so no file of them is kept: losses depend on the processor, random numbers on the release of NumPy, and states have a
hash of Parquet files, whose bytes depend on who writes them. Whoever moves code records the commit before.
"""
# ruff: noqa: E402  # a checkout is chosen before its package is imported

import argparse
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter, add_help=False)
parser.add_argument("--package", type=Path, default=ROOT, help="the checkout whose package is run")
PACKAGE = parser.parse_known_args()[0].package.resolve()
sys.path.insert(0, f"{PACKAGE}/typings")
os.environ |= {"PYTHONPATH": sys.path[0], "OMP_NUM_THREADS": "1"}

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from pyarrow import csv
from torch import multiprocessing
from torch.utils.data import DataLoader

from evenrank import dataloader as of
from evenrank import preprocess as pre
from evenrank.dataloader import balance as balancing
from evenrank.dataloader.routing import KeyMap
from evenrank.datasets import read_manifest
from evenrank.datasets.distributions import ClippedZipf, Lognormal, Normal, Uniform, Zipf

Results = Iterator[tuple[str, str]]
Options = dict[str, Any]
RICH, FLAT = "csv/rich", "csv/flat"


def digest(value: object) -> str:
    """Return a short hash of plain values; `repr` tells all floats apart."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def write_logs(folder: Path) -> None:
    """Write a log as delimited text, also in two parts, JSON lines with texts as ids, and Parquet; with features."""
    rng, number = np.random.default_rng(5), range(1, 91)
    users = np.repeat(number, rng.integers(1, 30, 90))
    count = len(users)
    times = 1_577_836_800 + np.sort(rng.integers(0, 20 * 86_400, count))  # from 2020-01-01 on
    columns = {"user": rng.permutation(users), "item": rng.integers(1, 9, count) * rng.integers(1, 9, count)}
    columns |= {name: rng.integers(1, high, count) for name, high in (("rating", 6), ("place", 50))}
    columns |= {"time": times, "dwell": rng.integers(0, 4000, count) / 8}
    rows = pa.table(columns).to_pylist()
    parts = {"log.csv": rows, "first.csv": rows[: count * 2 // 3], "later.csv": rows[count * 2 // 3 :]}
    tags = ["|".join("abcd"[: n % 4]) for n in number]
    parts["users.csv"] = [{"user": n, "segment": f"s{n % 5}", "share": n / 8, "tags": tags[n - 1]} for n in number]
    parts["items.csv"] = [{"item": n, "category": f"c{n % 7}", "price": n / 4} for n in range(1, 65)]
    parts["listed.csv"] = [{"user": n} for n in number[::4]]
    public = {"userId": "user", "movieId": "item", "rating": "rating", "timestamp": "time"}
    parts["ml-latest-small/ratings.csv"] = [{new: row[old] for new, old in public.items()} for row in rows]
    (folder / "ml-latest-small").mkdir()
    for name, part in parts.items():
        csv.write_csv(pa.Table.from_pylist(part), folder / name)
    texts = (json.dumps(row | {"user": f"u{row['user']}", "item": f"item {row['item']}"}) for row in rows)
    (folder / "log.jsonl").write_text("\n".join(texts))
    moments = [datetime.fromtimestamp(row["time"], UTC) for row in rows]
    pq.write_table(pa.table({**columns, "moment": moments}), folder / "log.parquet")


def options_of_datasets(folder: Path) -> Iterator[tuple[str, Options]]:
    """Yield name and options of preprocessing of each dataset."""

    def log(name: str, time: str = "time", **options: Any) -> pre.TabularConfig:
        columns: Options = {"user_column": "user", "item_column": "item", "timestamp_column": time}
        return pre.TabularConfig(events=(folder / name,), **columns, action_columns=("rating",), **options)

    drawn: Options = {"lengths": Lognormal(mean=9, std=9, low=0, high=40), "items": Zipf(exponent=1.1, high=300)}
    other: Options = {"lengths": Normal(mean=8, std=3, low=1, high=20), "items": ClippedZipf(exponent=1.2, high=90)}
    other["contextual"] = {"place": Uniform(low=0, high=3)}
    for name, options in {"plain": {}, "drift": {"drift": pre.Drift(categories=5)}, "other": other}.items():
        yield f"synthetic/{name}", {"synthetic": pre.SyntheticConfig(num_users=120, **drawn | options)}
    yield "synthetic/fractal", {"expand": "ml-latest-small:2x3", "raw_dir": folder}
    yield "public", {"dataset": "ml-latest-small", "raw_dir": folder, "split": "leave-last:1"}

    flat: Options = {"event_columns": ("dwell", "place:int"), "item_columns": ("category", "price:float")}
    flat |= {"item_features": (folder / "items.csv",), "context": folder / "users.csv", "action_map": "stars"}
    flat["context_columns"] = ("segment", "share:float")
    rich = log("log.csv", **flat | {"context_columns": ("segment", "share:float", "tags:list")})
    for split in ("user:0.3", "leave-last:2", "time:last:3d", "time:2020-01-15", "none"):
        yield f"csv/{split}", {"custom": rich, "split": split}
    yield "csv/file", {"custom": rich, "split": f"file:{folder}/listed.csv"}
    yield RICH, {"custom": rich, "split": "none", "ids": "dense", "requests": pre.RequestRule(seconds=86_400)}
    yield FLAT, {"custom": log("log.csv", **flat), "split": "none", "ids": "dense"}
    yield "csv/by date", {"custom": log("log.csv"), "requests": pre.RequestRule(seconds=3600, by_date=True)}
    yield "csv/items apart", {"custom": dataclasses.replace(rich, item_features_as="table"), "seed": 1}
    texts, parquet = log("log.jsonl", action_map="bins:2.5,4"), log("log.parquet", "moment")
    yield "jsonl/texts", {"custom": texts, "split": "leave-last:1"}
    yield "jsonl/hashed", {"custom": texts, "ids": "user=dense,item=hash:64"}
    yield "parquet/kept", {"custom": parquet, "ids": "keep"}
    yield "parquet/auto", {"custom": parquet, "split": "time:last:2d"}
    yield "filters/k-core", {"custom": log("log.csv"), "filters": pre.Filters(min_user_events=5, min_item_events=8)}
    yield "filters/lengths", {"custom": log("log.csv"), "filters": pre.Filters(min_length=4, max_length=20)}
    yield "filters/windows", {"custom": log("log.csv"), "filters": pre.Filters(window=6, stride=4), "split": "none"}
    first: Options = {"custom": log("first.csv", **flat), "split": "leave-last:1", "ids": "dense"}
    yield "first", first
    for rule in ("append", "drop", "oov"):
        yield f"unknown/{rule}", {"custom": log("later.csv"), "vocabulary": folder / "first", "unknown": rule}
    yield "first", first | {"custom": log("later.csv", **flat), "append": True}


def datasets(folder: Path) -> Results:
    """Preprocess all datasets."""
    left_out = r'"(sha256|content_hash|schema_version)": ("\w+"|\d+)'  # of the bytes of Parquet files, and versions
    for number, (name, options) in enumerate(options_of_datasets(folder)):
        out, kind = folder / name, "custom" if "custom" in options else "synthetic"
        pre.preprocess(pre.PreprocessConfig(**{"dataset": kind, "out": out, "allow_empty": True, **options}))
        place = f"datasets/{number} {name}"
        for path in sorted(out.rglob("*.parquet")):
            table, file = pq.read_table(path), path.relative_to(out)
            for column in table.schema:
                yield f"{place}/{file}/{column.name}", digest((str(column.type), table[column.name].to_pylist()))
        manifest = json.loads(re.sub(left_out, '"left out": 0', (out / "manifest.json").read_text()))
        yield from ((f"{place}/manifest/{key}", digest(manifest[key])) for key in manifest if key != "left out")


def contents(batch: Any) -> str:
    """Return the hash of a batch: every bit of its tensors, how many of its rows are samples, and its loss tokens."""
    parts: list[Any] = [batch.batch_size, batch.num_real, batch.loss_tokens, batch.world_loss_tokens]
    parts += [[*(limits or {}).values()] for limits in (batch.max_lengths, batch.length_limits)]
    for name, value in batch.tensors():
        tensors = [value]
        if hasattr(value, "length_per_key"):
            tensors = [value.values(), value.lengths(), value.weights_or_none()]
            parts.append(value.keys())
        arrays = [tensor.numpy() for tensor in tensors if hasattr(tensor, "numpy")]
        parts += [(name, str(array.dtype), array.shape, array.tobytes()) for array in arrays]
    return digest(parts)


def costs() -> Options:
    """Return the costs of the package, by name."""
    layers: Options = {"hidden": 16, "heads": 2, "head_dim": 8, "layers": 2}
    hstu, linear = balancing.HSTUCost(**layers, interleave_actions=False), balancing.LinearCost
    made: Options = {"hstu": hstu, "padded": balancing.PaddedCost(hstu), "linear": linear(interleave_actions=False)}
    made["codes"] = linear(history_key="semantic_id", interleave_actions=False)
    made["self-attention"] = balancing.SelfAttentionCost(**layers, ffn_multiplier=8 / 3, causal=False)
    return {**made, "actions": balancing.HSTUCost(**layers, interleave_actions=True)}


def makers(folder: Path) -> Options:
    """Return what makes the batches of a rank, given `rank` and `world_size`, by name."""
    rich, log = folder / RICH, folder / FLAT
    (log / "train" / "_END").touch()
    ways: dict[str, Options | None] = {"plain": None, "alone": {}, "window": {"window": 3}}
    ways |= {"packed": {"pack": True, "max_tokens_per_rank": 100}, "min-move": {"strategy": "min-move"}}
    ways["limit"] = {"max_tokens_per_rank": 60, "on_overflow": "warn"}
    shape: Options = {"batch_size": 6, "seed": 3, "max_history_length": 12}
    by_shuffle, by_row = (of.LoaderConfig(**shape, max_num_candidates=1, order=order) for order in ("shuffle", "rows"))
    stream: Any = of.StreamConfig(lanes=5, window_rows=1, poll_seconds=1e-3)
    numbers: Options = {"lengths": Uniform(low=1, high=14), "num_real": Uniform(low=2, high=6)}
    drawn = of.RandomData(items=Uniform(low=0, high=99), **numbers)

    def balance(way: str, cost: str = "hstu") -> Any:
        return None if (options := ways[way]) is None else balancing.BalanceConfig(cost=costs()[cost], **options)

    def stored(way: str = "plain", data: Any = rich, transform: Any = None, **options: Any) -> Any:
        is_coded = "codes" in options
        config = of.LoaderConfig(**shape, **({} if is_coded else {"max_num_candidates": 2}) | options)
        balanced = balance(way, "codes" if is_coded else "hstu")
        return partial(of.build_loader, data, config, transform=transform, balance=balanced)

    def elastic(way: str, **ranks: Any) -> Any:
        own: Any = [{"item_id": [*range(n * 5 % 9)], "price": [n / 7] * (n % 3)} for n in range(45)]
        lengths = {key: np.array([len(sample[key]) for sample in own]) for key in own[0]}
        of_way: Options = {"balance": balance(way), "lengths": None if way == "plain" else lengths}
        sampler = of.ElasticSampler(len(own), batch_size=4, seed=1, **ranks, **of_way)
        collate = of.JaggedCollate({"item_id": of.jagged(), "price": of.jagged(torch.float32, field="prices")})
        return of.ElasticLoader(DataLoader(own, batch_sampler=sampler, collate_fn=collate))

    rng, sizes, num_items = np.random.default_rng(2), (5, 7, 4), read_manifest(rich).vocabulary_sizes["item_id"]
    codes = np.stack([rng.integers(0, size, num_items) for size in sizes], axis=1).astype(np.int32)
    table, items = of.CodeTable(codes=codes, codebook_sizes=sizes), [*range(1, num_items)]
    lists = pa.table({"item_id": items, "negatives": [[n % 17 + 1, n % 23 + 1] for n in items]})
    pq.write_table(lists, hard := folder / f"hard {os.getpid()}.parquet")
    columns: Options = {"label": ("place", "dwell"), "weight": "share", "extra_events": ("dwell", "place")}
    orders: dict[str, Options] = {"stored/shuffle": {}, "stored/rows": {"order": "rows", "user_id": True} | columns}
    orders |= {"windows of time": {"order": of.TimeWindows(every="1w")}, "requests": {"order": of.Requests()}}
    orders["mixture"] = {"data": of.Mixture(weights={rich: 1, log: 2}, num_samples=57), "context": ("segment",)}
    kinds: Options = {f"{name}/{way}": stored(way, **options) for name, options in orders.items() for way in ways}
    kinds |= {f"elastic/{way}": partial(elastic, way) for way in ways}
    kinds["stream"] = partial(of.build_stream_loader, rich, by_shuffle, stream)
    kinds["log"] = partial(of.build_stream_loader, log, by_row, stream, follow=True)
    kinds["random"] = partial(of.RandomBatches, by_shuffle, drawn, num_batches=5)
    kinds["stored/dropped last step"] = stored(**columns, drop_last=True, max_num_candidates=0)
    kinds["stored/tasks"] = stored(num_tasks=3, candidate_actions=True, extra_events=("timestamp_ms",))
    kinds["stored/transform"] = stored(transform=lambda batch, rng: batch.index_select(rng.permutation(batch.num_real)))
    kinds["negatives/uniform"] = stored(negatives=of.Negatives(count=4))
    kinds["negatives/popularity"] = stored(negatives=of.Negatives(count=4, by="popularity", exclude_own=False))
    kinds["negatives/hard"] = stored(negatives=of.Negatives(count=4, hard=hard, num_hard=2, fixed=True))
    kinds["codes/targets"] = stored(codes=table, candidate_feature=True)
    kinds["codes/histories"] = stored("alone", codes=table, history_labels=True, label_offsets=True)
    for mode in ("roundrobin", "hash_roundrobin"):
        key_map: Any = partial(KeyMap, num_embeddings=num_items, world_size=3)
        kinds[f"key maps/{mode}"] = stored(key_maps={"item_id": key_map(mode=mode)})
    return kinds


def iterate(ranks: Sequence[Any]) -> Iterator[str]:
    """Yield the hash of the batches of each step of an epoch."""
    for of_ranks in itertools.zip_longest(*ranks):
        yield digest([batch and contents(batch) for batch in of_ranks])


def batches(folder: Path) -> Results:
    """Iterate over two epochs of all loaders, save their states after each step, and resume on other ranks."""
    for name, make in makers(folder).items():
        for world in (1, 2, 3):
            ranks = [make(rank=rank, world_size=world) for rank in range(world)]
            saved = [[json.dumps(rank.state_dict(), sort_keys=True) for rank in ranks]]
            for epoch in range(1 if name == "log" else 2):
                for step, of_step in enumerate(iterate(ranks)):
                    place = f"{name}/world {world}/{f'epoch {epoch}/' if epoch else ''}step {step}"
                    yield f"batches/{place}", of_step
                    saved.append([json.dumps(rank.state_dict(), sort_keys=True) for rank in ranks])
                    yield f"states/{place}", digest([*dict.fromkeys(saved[-1])])
            yield f"states/{name}/world {world}/begin", digest([*dict.fromkeys(saved[0])])
        for step, texts in enumerate(saved[1:4] if name != "random" else []):
            ranks, states = [make(rank=rank, world_size=2) for rank in range(2)], [*map(json.loads, texts)]
            for rank in ranks:
                rank.load_state_dict(states[0])
            yield f"resumed/{name}/world 3 to 2/step {step}", digest([*iterate(ranks)])


def partitions(folder: Path) -> Results:
    """Partition seeded costs with all strategies, and compute the costs of seeded lengths."""
    for world, rows, seed in itertools.product((2, 3, 4, 8, 16, 64, 256), (1, 4, 16), range(3)):
        rng = np.random.default_rng((world, rows, seed))
        tokens = [rng.geometric(0.01, (world, rows)), rng.integers(0, 4, (world, rows))][seed % 2]
        limit = int(tokens.sum() / world * 1.2) + 1
        options: dict[str, Options] = {"costs": {}, "tokens": {"tokens": tokens}, "padded": {"padded": True}}
        options["limit"] = {"tokens": tokens, "max_tokens_per_rank": limit, "on_overflow": "warn"}
        options["padding"] = {"tokens": tokens, "num_real": rng.integers(0, rows + 1, world), "tolerance": 0.05}
        for strategy, option in itertools.product(("none", "karmarkar-karp", "lpt-swap", "min-move"), options):
            made = balancing.partition(tokens**2 + 3 * tokens, world, strategy=strategy, **options[option])
            yield f"partitions/{strategy}/{option}/world {world}/rows {rows}/seed {seed}", digest(made.rank_of.tolist())
    lengths = {name: np.random.default_rng(4).integers(5, 900, 64) for name in ("item_id", "action", "semantic_id")}
    for (name, cost), candidates in itertools.product(costs().items(), range(4)):
        yield f"costs/{name}/candidates {candidates}", digest(cost(lengths, np.full(64, candidates)).tolist())


def exchange(folder: Path) -> Results:
    """Balance over two ranks that exchange samples."""
    multiprocessing.spawn(exchange_on, (folder,), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    yield from json.loads((folder / "exchanged 0.json").read_text()).items()


def exchange_on(rank: int, folder: Path) -> None:
    """Write what both ranks get."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results, made = {}, makers(folder)
    names = "stored/rows/plain mixture/plain elastic/plain negatives/hard codes/targets stream random"
    for name, collective in itertools.product(names.split(), ("all-to-all", "all-gather")):
        config = balancing.BalanceConfig(cost=costs()["codes" if "codes" in name else "linear"], exchange=collective)
        with balancing.Balancer(made[name](rank=rank, world_size=2), config) as balancer:
            for step, batch in enumerate(balancer):
                of_ranks: list[Any] = [None, None]
                dist.all_gather_object(of_ranks, (contents(batch), json.dumps(balancer.state_dict())))
                results[f"exchange/{name}/{collective}/step {step}"] = digest(of_ranks)
    (folder / f"exchanged {rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def training(folder: Path) -> Results:
    """Train with scripts/train.py on two ranks; losses and metrics are kept by value."""
    small = "--max-steps 8 --log-every 1 --batch-size 8 --hidden 16 --heads 1 --layers 1 --num-workers 0"
    jobs = {"semantic ids": "--model semantic-ids --window 2", "ranking": "--time-windows 1w --balance all-gather"}
    jobs["retrieval"] = "--task retrieval --balance all-to-all --strategy min-move"
    for name, options in jobs.items():
        out, ranks = folder / "train" / name, ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command = [sys.executable, "-P", "-m", *ranks, f"{PACKAGE}/scripts/train.py", *small.split(), *options.split()]
        paths = ["--data", f"{folder}/csv/user:0.3", "--out", str(out)]
        subprocess.run([*command, *paths], check=True, stdout=subprocess.DEVNULL)
        for number, line in enumerate((out / "log.jsonl").read_text().splitlines()):
            for key, value in json.loads(line).items():
                if not any(word in key for word in ("ms", "second", "flops", "measured", "kind")):
                    yield f"training/{name}/line {number}/{key}", repr(value)


SECTIONS = {function.__name__: function for function in (datasets, batches, partitions, exchange, training)}
READ_NOTHING = {"partitions"}


def main() -> int:
    """Record or compare; all sections but `READ_NOTHING` read the datasets."""
    parser.add_argument("-h", "--help", action="help")
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=[*SECTIONS], help="make these results alone")
    arguments = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        write_logs(Path(name))
        read = ["datasets"] if {*arguments.only} - READ_NOTHING else []
        for section in dict.fromkeys([*read, *arguments.only]):
            found = dict(SECTIONS[section](Path(name)))
            print(f"{section}: {len(found)} results", file=sys.stderr, flush=True)
            results |= found if section in arguments.only else {}
    if arguments.command == "record":
        arguments.file.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")
        return 0
    recorded = json.loads(arguments.file.read_text())
    names = {*results, *recorded} if arguments.only == [*SECTIONS] else {*results}
    differing = sorted(name for name in names if results.get(name) != recorded.get(name))
    print("\n".join([*differing, f"{len(differing)} of {len(names)} results differ"]))
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
