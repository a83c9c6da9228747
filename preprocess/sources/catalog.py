"""The public datasets as records (URL, checksum, file layout, rating scale), and the names of all datasets.

Imports nothing heavy, so that a command line can list the names without loading Polars.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicArchive(ABC):
    """An archive that can be downloaded and unpacked."""

    name: str
    """Name of the dataset."""
    url: str
    """Where the archive is downloaded from."""
    md5: str
    """MD5 of the archive, in hexadecimal."""

    @property
    def archive(self) -> str:
        """File name of the archive."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def folder(self) -> str:
        """Folder of the files, both inside the archive and below the raw folder; named like the archive."""
        return self.archive.removesuffix(".zip").removesuffix(".tar.gz")

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """The files that are needed, as paths relative to `folder`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MovieLensDataset(PublicArchive):
    """A MovieLens dataset."""

    ratings: str
    """Name of the rating file."""
    users: str | None = None
    """Name of the file with the users' features; None if there is none."""
    separator: str
    """Separator between the fields of a line."""
    has_header: bool = False
    """Whether the first line of `ratings` contains the column names."""
    ratings_per_star: int
    """1 for ratings in whole stars, 2 for half stars."""
    max_stars: int = 5
    """The highest rating."""

    @property
    def files(self) -> tuple[str, ...]:
        """The rating file, then the file with the users' features if there is one."""
        return (self.ratings,) if self.users is None else (self.ratings, self.users)

    @property
    def num_actions(self) -> int:
        """Number of steps of the rating scale; ratings are encoded as 0..num_actions-1, lowest first."""
        return self.max_stars * self.ratings_per_star


@dataclass(frozen=True, kw_only=True, slots=True)
class KuaiRandDataset(PublicArchive):
    """A KuaiRand dataset."""

    logs: tuple[str, ...]
    """The log files, in time order."""
    users: str
    """The file with the users' features."""

    @property
    def files(self) -> tuple[str, ...]:
        """The logs, then the file with the users' features."""
        return (*self.logs, self.users)


def _kuairand(size: str, *, md5: str, parts: tuple[str, ...] = ("",)) -> KuaiRandDataset:
    suffix = size.lower()
    return KuaiRandDataset(
        name=f"kuairand-{suffix}",
        url=f"https://zenodo.org/records/10439422/files/KuaiRand-{size}.tar.gz",
        md5=md5,
        logs=tuple(
            f"data/log_standard_{dates}_{suffix}{part}.csv"
            for dates in ("4_08_to_4_21", "4_22_to_5_08")
            for part in parts
        ),
        users=f"data/user_features_{suffix}.csv",
    )


CATALOG: dict[str, MovieLensDataset | KuaiRandDataset] = {
    dataset.name: dataset
    for dataset in (
        MovieLensDataset(
            name="ml-1m",
            url="http://files.grouplens.org/datasets/movielens/ml-1m.zip",
            md5="c4d9eecfca2ab87c1945afe126590906",
            ratings="ratings.dat",
            users="users.dat",
            separator="::",
            ratings_per_star=1,
        ),
        MovieLensDataset(
            name="ml-20m",
            url="http://files.grouplens.org/datasets/movielens/ml-20m.zip",
            md5="cd245b17a1ae2cc31bb14903e1204af3",
            ratings="ratings.csv",
            separator=",",
            has_header=True,
            ratings_per_star=2,
        ),
        _kuairand("Pure", md5="0820331067a3784d9691136f772b35a7"),
        _kuairand("1K", md5="6b0b9c8222d67fcd4c676218edca3f1f"),
        _kuairand("27K", md5="3e3c799a24e2d23a4d2c757fbf9adf59", parts=("_part1", "_part2")),
    )
}

# Datasets without an archive: drawn from distributions, and read from files that the user describes.
SYNTHETIC = "synthetic"
CUSTOM = "custom"

DATASETS = (*CATALOG, SYNTHETIC, CUSTOM)
