"""Benchmark preprocessing against two baselines: pandas, and a bare Polars query without any checks.

    .venv/bin/python scripts/bench/preprocess.py [--shape ml-20m|kuairand-1k|large] [--runs 3] [--dir DIR]

Writes an input of the given shape to DIR (and reuses it the next time), runs the variants alternately, each in its own
process, and prints one JSON line per variant: median seconds and peak memory, and their ratios to those of evenrank.
`large` has 100 M rows in the format of ml-20m and runs without baselines.
"""

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path

import numpy as np
import polars as pl
from preprocess_parts import FLAGS, draw_kuairand, run

# Users and events. Histories of ml-20m are lognormal: median 82, largest about 12,000.
_SHAPES = {"ml-20m": (138_493, 20_000_000), "large": (692_465, 100_000_000), "kuairand-1k": (1_000, 11_700_000)}

_PANDAS = {
    "ml-20m": """
import pandas as pd
frame = pd.read_csv(source).sort_values("timestamp", kind="stable")
frame.groupby("userId").agg(list).to_csv(out + ".csv")
""",
    "kuairand-1k": """
import pandas as pd
frame = pd.concat([pd.read_csv(part) for part in source.split(",")]).sort_values("time_ms", kind="stable")
frame["action"] = sum(frame[name] * 2**bit for bit, name in enumerate(flags + ["is_profile_enter"]))
columns = ["video_id", "action", "time_ms", "play_time_ms", "duration_ms"]
frame.groupby("user_id")[columns].agg(list).to_csv(out + ".csv")
""",
}
_POLARS = {
    "ml-20m": """
import polars as pl
columns = pl.col("movieId", "rating", "timestamp")
pl.scan_csv(source).group_by("userId").agg(columns.sort_by("timestamp")).collect().write_parquet(out + ".parquet")
""",
    "kuairand-1k": """
import polars as pl
action = pl.sum_horizontal(pl.col(name) * 2**bit for bit, name in enumerate(flags + ["is_profile_enter"]))
columns = pl.col("video_id", "action", "time_ms", "play_time_ms", "duration_ms")
lines = pl.scan_csv(source.split(",")).with_columns(action=action)
lines.group_by("user_id").agg(columns.sort_by("time_ms")).collect().write_parquet(out + ".parquet")
""",
}
_EVENRANK = """
from pathlib import Path
from evenrank.preprocess import PreprocessConfig, preprocess
preprocess(PreprocessConfig(dataset=dataset, raw_dir=Path(raw), out=Path(out)))
"""


def make_movielens(folder: Path, num_users: int, num_events: int) -> str:
    """Write FOLDER/ml-20m/ratings.csv unless it exists; return its path."""
    path = folder / "ml-20m" / "ratings.csv"
    if path.exists():
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(82), 1.05, num_users), 20, 12_000)
    lengths = np.maximum(1, (lengths * num_events / lengths.sum()).astype(np.int64))
    with path.with_suffix(".partial").open("wb") as file:
        for first in range(0, num_users, 100_000):
            counts = lengths[first : first + 100_000]
            total = int(counts.sum())
            pl.DataFrame(
                {
                    "userId": np.repeat(np.arange(first + 1, first + 1 + len(counts)), counts),
                    "movieId": rng.integers(1, 131_263, total),
                    "rating": rng.integers(1, 11, total) / 2,
                    "timestamp": rng.integers(789_652_009, 1_427_784_002, total),
                }
            ).write_csv(file, include_header=first == 0)
    path.with_suffix(".partial").rename(path)
    return str(path)


def make_kuairand(folder: Path, num_users: int, num_events: int) -> str:
    """Write the two logs and the users' features of KuaiRand-1K; return the paths of the logs, comma-separated."""
    data = folder / "KuaiRand-1K" / "data"
    data.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    paths = [data / f"log_standard_{dates}_1k.csv" for dates in ("4_08_to_4_21", "4_22_to_5_08")]
    for number, path in enumerate(paths):
        if path.exists():
            continue
        draw_kuairand(rng, num_events // 2, num_users, first_day=14 * number).write_csv(path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)
    features = ["user_active_degree", *(f"{name}_user_num_range" for name in ("follow", "fans", "friend"))]
    users = {"user_id": np.arange(num_users), **{name: ["high"] * num_users for name in features}}
    pl.DataFrame({**users, "register_days_range": ["61-90"] * num_users}).write_csv(data / "user_features_1k.csv")
    return ",".join(map(str, paths))


def main() -> None:
    """Run the variants on one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="ml-20m")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    shape = arguments.shape
    folder = arguments.dir.absolute() / shape
    make = make_kuairand if shape == "kuairand-1k" else make_movielens
    # In a separate process, because peak memory of this one would be inherited by the processes it starts.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        source = pool.apply(make, (folder, *_SHAPES[shape]))
    dataset = "ml-20m" if shape == "large" else shape
    variables = {
        "source": source,
        "out": str(folder / "out"),
        "raw": str(folder),
        "dataset": dataset,
        "flags": [*FLAGS],
    }
    variants = {"evenrank": _EVENRANK}
    if shape != "large":
        variants |= {"polars, bare": _POLARS[shape], "pandas": _PANDAS[shape]}
        run(_EVENRANK, variables)  # the first run after an installation compiles
    runs: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    for _ in range(arguments.runs):
        for variant, code in variants.items():
            runs[variant].append(run(code, variables))
    seconds = {variant: statistics.median(run_seconds for run_seconds, _ in runs[variant]) for variant in variants}
    peak_mib = {variant: statistics.median(run_mib for _, run_mib in runs[variant]) for variant in variants}
    for variant in variants:
        row = {
            "shape": shape,
            "variant": variant,
            "seconds": round(seconds[variant], 2),
            "peak_mib": round(peak_mib[variant]),
            "million_rows_per_second": round(_SHAPES[shape][1] / seconds[variant] / 1e6, 2),
            "relative_seconds": round(seconds[variant] / seconds["evenrank"], 2),
            "relative_memory": round(peak_mib[variant] / peak_mib["evenrank"], 2),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
