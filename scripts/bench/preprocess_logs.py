"""The logs that `preprocess.py` reads, drawn on all cores: of the columns and the shape of public ones."""

import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from preprocess_variants import FLAGS

Draw = Callable[[Path], None]
USERS_AT_ONCE, ROWS_OF_A_FILE = 20_000, 5_000_000


def draw_movielens(part: int, counts: Sequence[int], path: Path) -> None:
    """Write some users' ratings in the format of MovieLens-20M; the first part has the header."""
    rng, total = np.random.default_rng((0, part)), sum(counts)
    first = 1 + part * USERS_AT_ONCE
    ratings = {
        "userId": np.repeat(np.arange(first, first + len(counts)), counts),
        "movieId": rng.integers(1, 131_263, total),
        "rating": rng.integers(1, 11, total) / 2,
        "timestamp": rng.integers(789_652_009, 1_427_784_002, total),
    }
    pl.DataFrame(ratings).write_csv(path, include_header=part == 0)


def draw_kuairand(number: int, count: int, num_users: int, path: Path) -> None:
    """Write events of two weeks with the columns of KuaiRand's logs, by day."""
    rng = np.random.default_rng(number)
    days = np.sort(rng.integers(0, 14, count)) + 14 * number
    events = {
        "user_id": rng.integers(0, num_users, count),
        "video_id": rng.integers(0, 4_371_900, count),
        "date": 20_220_408 + days,
        "hourmin": rng.integers(0, 24, count) * 100,
        "time_ms": 1_649_347_200_000 + days * 86_400_000 + rng.integers(0, 86_400_000, count),
        **{name: (rng.random(count) < 0.3).astype(np.int64) for name in FLAGS},
        "play_time_ms": rng.integers(0, 60_000, count),
        "duration_ms": rng.integers(3_000, 120_000, count),
        "profile_stay_time": np.zeros(count, dtype=np.int64),
        "comment_stay_time": np.zeros(count, dtype=np.int64),
        "is_profile_enter": (rng.random(count) < 0.01).astype(np.int64),
        "is_rand": np.zeros(count, dtype=np.int64),
        "tab": rng.integers(0, 15, count),
    }
    pl.DataFrame(events).write_csv(path)


def make_log(shape: str, folder: Path, millions: float) -> list[Path]:
    """Write a log to a folder unless it has it, and what else the dataset needs; return its files.

    This process keeps small, because those that it starts would inherit its peak memory.
    """
    num_rows, parts = round(millions * 1_000_000), list[Draw]()
    if shape == "ml-20m":
        files = [folder / "ml-20m" / "ratings.csv"]
        lengths = np.random.default_rng(0).lognormal(np.log(82), 1.05, round(6924.65 * millions)).clip(20, 12_000)
        counts = np.maximum(1, (lengths * num_rows / lengths.sum()).astype(np.int64)).tolist()
        for number, first in enumerate(range(0, len(counts), USERS_AT_ONCE)):
            parts.append(partial(draw_movielens, number, counts[first : first + USERS_AT_ONCE]))
    else:
        data, num_users = folder / "KuaiRand-1K" / "data", 1000
        files = [data / f"log_standard_{dates}_1k.csv" for dates in ("4_08_to_4_21", "4_22_to_5_08")]
        if shape == "kuairand":
            num_users = round(2000 * millions)
            files = [folder / f"log-{number:03d}.csv" for number in range(-(-num_rows // ROWS_OF_A_FILE))]
        ends = [num_rows * number // len(files) for number in range(len(files) + 1)]
        parts += [partial(draw_kuairand, n, end - ends[n], num_users) for n, end in enumerate(ends[1:])]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    if shape == "kuairand-1k":
        names = ["user_active_degree", *(f"{name}_user_num_range" for name in ("follow", "fans", "friend"))]
        users = {"user_id": np.arange(1000), **{name: ["high"] * 1000 for name in names}}
        pl.DataFrame({**users, "register_days_range": ["61-90"] * 1000}).write_csv(data / "user_features_1k.csv")
    if not all(path.exists() for path in files):
        draw_all(parts, files)
    for path in files:  # so that the first run finds them in the page cache, too
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    return files


def draw_all(parts: Sequence[Draw], files: Sequence[Path]) -> None:
    """Draw the parts of a log, one for each file or all for one, on all cores."""
    drawn = [files[0].with_name(f"{number}.partial") for number in range(len(parts))]
    os.environ["POLARS_MAX_THREADS"] = "1"  # of each process
    with multiprocessing.get_context("spawn").Pool(min(num_cores(), len(parts))) as pool:
        for result in [pool.apply_async(draw, (path,)) for draw, path in zip(parts, drawn, strict=True)]:
            result.get()
    del os.environ["POLARS_MAX_THREADS"]
    if len(files) == 1:
        with drawn[0].open("ab") as file:
            for path in drawn[1:]:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, file, 1 << 24)
                path.unlink()
    for path, final in zip(drawn, files, strict=False):
        path.rename(final)


def num_cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0))
