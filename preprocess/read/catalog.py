"""The public datasets as records: URL, checksum, and what their logs look like. The names of all datasets.

Imports nothing heavy, so that a command line can list the names without loading Polars.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from evenrank.preprocess.log_config import TabularConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicArchive:
    """An archive that can be downloaded and unpacked."""

    name: str  # of the dataset
    url: str
    md5: str | None  # of the archive, in hexadecimal; None if its host changes it from time to time
    log: TabularConfig  # whose files are paths relative to `folder`

    @property
    def archive(self) -> str:
        """File name of the archive."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def folder(self) -> str:
        """Folder of the files, both inside the archive and below the raw folder."""
        return self.archive.removesuffix(".zip").removesuffix(".tar.gz")

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are needed: those of events, then that of the users' features."""
        return tuple(map(str, filter(None, (*self.log.events, self.log.context))))

    def log_in(self, folder: Path) -> TabularConfig:
        """Return the log with the files in a folder."""
        context = None if self.log.context is None else folder / self.log.context
        return replace(self.log, events=tuple(folder / path for path in self.log.events), context=context)


_RATINGS = TabularConfig(
    events=(Path("ratings.csv"),),
    user_column="userId",
    item_column="movieId",
    timestamp_column="timestamp",
    timestamp_unit="s",
    action_columns=("rating",),
    action_map="half-stars",
)
_RATINGS_1M = replace(
    _RATINGS,
    events=(Path("ratings.dat"),),
    action_map="stars",
    delimiter="::",
    columns=("userId", "movieId", "rating", "timestamp"),
    context=Path("users.dat"),
    context_header=("userId", "sex", "age_group", "occupation", "zip_code"),
    context_columns=("sex", "age_group", "occupation", "zip_code"),
)


def _movielens(size: str, *, md5: str | None, log: TabularConfig = _RATINGS) -> PublicArchive:
    url = f"http://files.grouplens.org/datasets/movielens/ml-{size}.zip"
    return PublicArchive(name=f"ml-{size}", url=url, md5=md5, log=log)


def _kuairand(size: str, *, md5: str, parts: tuple[str, ...] = ("",)) -> PublicArchive:
    suffix, dates = size.lower(), ("4_08_to_4_21", "4_22_to_5_08")
    log = TabularConfig(
        events=tuple(Path(f"data/log_standard_{days}_{suffix}{part}.csv") for days in dates for part in parts),
        user_column="user_id",
        item_column="video_id",
        timestamp_column="time_ms",
        timestamp_unit="ms",
        # How the user responded to the video.
        action_columns=(
            *("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view"),
            "is_profile_enter",
        ),
        event_columns=("play_time_ms:int", "duration_ms:int"),
        context=Path(f"data/user_features_{suffix}.csv"),
        context_columns=(
            "user_active_degree",
            "follow_user_num_range",
            "fans_user_num_range",
            "friend_user_num_range",
            "register_days_range",
        ),
    )
    url = f"https://zenodo.org/records/10439422/files/KuaiRand-{size}.tar.gz"
    return PublicArchive(name=f"kuairand-{suffix}", url=url, md5=md5, log=log)


CATALOG: dict[str, PublicArchive] = {
    dataset.name: dataset
    for dataset in (
        _movielens("latest-small", md5=None),
        _movielens("1m", md5="c4d9eecfca2ab87c1945afe126590906", log=_RATINGS_1M),
        _movielens("20m", md5="cd245b17a1ae2cc31bb14903e1204af3"),
        _movielens("25m", md5="6b51fb2759a8657d3bfcbfc42b592ada"),
        _movielens("32m", md5="d472be332d4daa821edc399621853b57"),
        _kuairand("Pure", md5="0820331067a3784d9691136f772b35a7"),
        _kuairand("1K", md5="6b0b9c8222d67fcd4c676218edca3f1f"),
        _kuairand("27K", md5="3e3c799a24e2d23a4d2c757fbf9adf59", parts=("_part1", "_part2")),
    )
}

# Datasets without an archive: drawn from distributions, and read from files that the user describes.
SYNTHETIC = "synthetic"
CUSTOM = "custom"
DATASETS = (*CATALOG, SYNTHETIC, CUSTOM)
