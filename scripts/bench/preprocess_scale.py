"""Benchmark how preprocessing scales with rows, cores and engines: logs of KuaiRand's columns, 10 to 100 million rows.

    .venv/bin/python scripts/bench/preprocess_scale.py [--millions 10,30,100] [--cores 1,2] [--engines local,ray]
        [--dir DIR]

Writes logs to DIR (8 GB for 100 million rows; reuses them the next time), preprocesses each on each number of cores, in
processes of their own, and prints one JSON line per run: seconds, the peak memory of all processes together (shared
pages count once), rows per second, the time relative to that of the first engine on the fewest cores and on as many
cores, and the time per row relative to that of the smallest log.
"""

import argparse
import itertools
import json
import multiprocessing
from pathlib import Path

import numpy as np
from preprocess_parts import draw_kuairand, run

_ROWS_AT_ONCE = 5_000_000
_EVENRANK = """
import os
from pathlib import Path
os.sched_setaffinity(0, range(cores))
from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess
log = TabularConfig(
    events=tuple(map(Path, sources)),
    user_column="user_id",
    item_column="video_id",
    timestamp_column="time_ms",
    action_columns=("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view"),
    event_columns=("play_time_ms:int=0", "duration_ms:int=0"),
)
preprocess(PreprocessConfig(dataset="custom", out=Path(out), custom=log, ids="dense", engine=engine))
"""


def make_logs(folder: Path, millions: int) -> list[str]:
    """Write files of 5 million rows unless they exist, for 2,000 users per million; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"log-{number:03d}.csv" for number in range(millions * 1_000_000 // _ROWS_AT_ONCE)]
    for number, path in enumerate(paths):
        if not path.exists():
            events = draw_kuairand(np.random.default_rng(number), _ROWS_AT_ONCE, 2000 * millions, first_day=14 * number)
            events.write_csv(path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
    return [str(path) for path in paths]


def main() -> None:
    """Run all sizes on all numbers of cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", default="10,30,100")
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--engines", default="local")
    parser.add_argument("--dir", type=Path, default=Path("out/bench/scale"))
    arguments = parser.parse_args()
    folder, all_cores = arguments.dir.absolute(), [int(count) for count in arguments.cores.split(",")]
    engines = arguments.engines.split(",")
    first: dict[tuple[str, int], float] = {}  # seconds per million rows of the smallest log, by engine and cores
    for millions in map(int, arguments.millions.split(",")):
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # or its peak memory would be inherited
            sources = pool.apply(make_logs, (folder / str(millions), millions))
        seconds: dict[tuple[str, int], float] = {}  # by engine and cores
        for key in itertools.product(engines, all_cores):
            variables = {"sources": sources, "out": str(folder / "out"), "engine": key[0], "cores": key[1]}
            if not first:
                run(_EVENRANK, variables)  # the first run after an installation compiles
            seconds[key], peak_mib = run(_EVENRANK, variables)
            per_million = seconds[key] / millions
            row = {
                "million_rows": millions,
                "engine": key[0],
                "cores": key[1],
                "seconds": round(seconds[key], 1),
                "peak_mib": round(peak_mib),
                "million_rows_per_second": round(1 / per_million, 2),
                "relative_to_fewest_cores": round(seconds[key] / seconds[key[0], all_cores[0]], 2),
                "relative_to_first_engine": round(seconds[key] / seconds[engines[0], key[1]], 2),
                "per_row_relative_to_smallest": round(per_million / first.setdefault(key, per_million), 2),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
