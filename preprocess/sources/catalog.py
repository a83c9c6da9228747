"""The public datasets as records: where they are had, what their files look like, how an action is coded."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicArchive(ABC):
    """What can be downloaded and unpacked."""

    name: str
    url: str
    md5: str  # of the archive

    @property
    def archive(self) -> str:
        """The archive's file name."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def folder(self) -> str:
        """The folder of the files, in the archive and below the raw folder: it is named as the archive is."""
        return self.archive.removesuffix(".zip").removesuffix(".tar.gz")

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """The files that are read, as paths below `folder`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicDataset(PublicArchive):
    """A MovieLens dataset."""

    ratings: str  # file name
    users: str | None = None  # file name of the users' features
    separator: str
    has_header: bool = False  # the first line of `ratings` names the columns
    ratings_per_star: int  # 1 where ratings are whole stars, 2 where they are halves
    max_stars: int = 5

    @property
    def files(self) -> tuple[str, ...]:
        """The rating file, and the one of the users' features where there is one."""
        return (self.ratings,) if self.users is None else (self.ratings, self.users)

    @property
    def num_actions(self) -> int:
        """The rating scale's steps, coded 0..num_actions-1 from the lowest rating on."""
        return self.max_stars * self.ratings_per_star


@dataclass(frozen=True, kw_only=True, slots=True)
class KuaiRandDataset(PublicArchive):
    """A KuaiRand dataset."""

    logs: tuple[str, ...]  # one behind the other they are in time order
    users: str  # the users' features

    @property
    def files(self) -> tuple[str, ...]:
        """The logs, then the file of the users' features."""
        return (*self.logs, self.users)


CATALOG: dict[str, PublicDataset | KuaiRandDataset] = {
    dataset.name: dataset
    for dataset in (
        PublicDataset(
            name="ml-1m",
            url="http://files.grouplens.org/datasets/movielens/ml-1m.zip",
            md5="c4d9eecfca2ab87c1945afe126590906",
            ratings="ratings.dat",
            users="users.dat",
            separator="::",
            ratings_per_star=1,
        ),
        PublicDataset(
            name="ml-20m",
            url="http://files.grouplens.org/datasets/movielens/ml-20m.zip",
            md5="cd245b17a1ae2cc31bb14903e1204af3",
            ratings="ratings.csv",
            separator=",",
            has_header=True,
            ratings_per_star=2,
        ),
        KuaiRandDataset(
            name="kuairand-pure",
            url="https://zenodo.org/records/10439422/files/KuaiRand-Pure.tar.gz",
            md5="0820331067a3784d9691136f772b35a7",
            logs=("data/log_standard_4_08_to_4_21_pure.csv", "data/log_standard_4_22_to_5_08_pure.csv"),
            users="data/user_features_pure.csv",
        ),
        KuaiRandDataset(
            name="kuairand-1k",
            url="https://zenodo.org/records/10439422/files/KuaiRand-1K.tar.gz",
            md5="6b0b9c8222d67fcd4c676218edca3f1f",
            logs=("data/log_standard_4_08_to_4_21_1k.csv", "data/log_standard_4_22_to_5_08_1k.csv"),
            users="data/user_features_1k.csv",
        ),
        KuaiRandDataset(
            name="kuairand-27k",
            url="https://zenodo.org/records/10439422/files/KuaiRand-27K.tar.gz",
            md5="3e3c799a24e2d23a4d2c757fbf9adf59",
            logs=(
                "data/log_standard_4_08_to_4_21_27k_part1.csv",
                "data/log_standard_4_08_to_4_21_27k_part2.csv",
                "data/log_standard_4_22_to_5_08_27k_part1.csv",
                "data/log_standard_4_22_to_5_08_27k_part2.csv",
            ),
            users="data/user_features_27k.csv",
        ),
    )
}
