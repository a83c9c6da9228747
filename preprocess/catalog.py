"""The public datasets as records: where they are had, what their files look like, how an action is coded."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicDataset:
    """A dataset that can be downloaded."""

    name: str  # also the folder of its files below the raw folder, and in its archive
    url: str
    md5: str  # of the archive
    ratings: str  # file name
    users: str | None = None  # file name of the users' features
    separator: str
    header: str | None = None  # the first line of `ratings`, or None where the data begin at once
    ratings_per_star: int  # 1 where ratings are whole stars, 2 where they are halves
    max_stars: int = 5

    @property
    def archive(self) -> str:
        """The archive's file name."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the archive that are read."""
        return (self.ratings,) if self.users is None else (self.ratings, self.users)

    @property
    def num_actions(self) -> int:
        """The rating scale's steps, coded 0..num_actions-1 from the lowest rating on."""
        return self.max_stars * self.ratings_per_star


CATALOG = {
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
            header="userId,movieId,rating,timestamp",
            ratings_per_star=2,
        ),
    )
}
