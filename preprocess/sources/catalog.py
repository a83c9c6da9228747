"""The public datasets as records (URL, checksum, file layout, rating scale), and the names of all datasets.

Imports nothing heavy, so that a command line can list the names without loading Polars.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicArchive:
    """An archive that can be downloaded and unpacked. Its files are paths relative to `folder`."""

    name: str  # of the dataset
    url: str
    md5: str  # of the archive, in hexadecimal
    events: tuple[str, ...]  # files of ratings or logs, in time order
    users: str | None = None  # file of the users' features

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
        return self.events if self.users is None else (*self.events, self.users)


@dataclass(frozen=True, kw_only=True, slots=True)
class MovieLensDataset(PublicArchive):
    """A MovieLens dataset: one file of ratings, on a scale that ends with 5 stars."""

    separator: str
    has_header: bool = False  # of the ratings
    ratings_per_star: int  # 1 for ratings in whole stars, 2 for half stars

    @property
    def num_actions(self) -> int:
        """Number of steps of the rating scale."""
        return 5 * self.ratings_per_star


def _kuairand(size: str, *, md5: str, parts: tuple[str, ...] = ("",)) -> PublicArchive:
    suffix = size.lower()
    return PublicArchive(
        name=f"kuairand-{suffix}",
        url=f"https://zenodo.org/records/10439422/files/KuaiRand-{size}.tar.gz",
        md5=md5,
        events=tuple(
            f"data/log_standard_{dates}_{suffix}{part}.csv"
            for dates in ("4_08_to_4_21", "4_22_to_5_08")
            for part in parts
        ),
        users=f"data/user_features_{suffix}.csv",
    )


CATALOG: dict[str, PublicArchive] = {
    dataset.name: dataset
    for dataset in (
        MovieLensDataset(
            name="ml-1m",
            url="http://files.grouplens.org/datasets/movielens/ml-1m.zip",
            md5="c4d9eecfca2ab87c1945afe126590906",
            events=("ratings.dat",),
            users="users.dat",
            separator="::",
            ratings_per_star=1,
        ),
        MovieLensDataset(
            name="ml-20m",
            url="http://files.grouplens.org/datasets/movielens/ml-20m.zip",
            md5="cd245b17a1ae2cc31bb14903e1204af3",
            events=("ratings.csv",),
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
