"""Which rows go where."""

import numpy as np
import polars as pl

from evenrank.datasets.errors import ConfigError
from evenrank.datasets.schema import USER_ID, user_hash

TRAIN = "train"
EVAL = "eval"


def split_by_user(sequences: pl.DataFrame, *, eval_fraction: float, seed: int) -> dict[str, pl.DataFrame]:
    """Send each user to `eval` with this probability, to `train` otherwise; the order of rows stays.

    A user's split depends on its id and the seed alone: it does not change as other users come and go.

    Raises:
        ConfigError: the fraction is outside 0..1.

    """
    if not 0 <= eval_fraction <= 1:
        raise ConfigError(f"eval_fraction must lie in 0..1, got {eval_fraction}")
    # The salt only has to differ from 0, which orders the rows.
    hashes = user_hash(sequences.get_column(USER_ID).to_numpy(), salt=(seed << 1) | 1)
    # The top 53 bits are exact in a float64, and below 1.
    in_eval = pl.Series((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < eval_fraction)
    return {TRAIN: sequences.filter(~in_eval), EVAL: sequences.filter(in_eval)}
