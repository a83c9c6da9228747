"""`tables`: the embedding tables of a model."""

from collections.abc import Mapping

from torch import nn
from torchrec import EmbeddingConfig

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import ACTION, ITEM_ID
from hstu.config import HSTUConfig

NEGATIVE_ID = "negative_id"

_MARK = ":"  # in no name of a feature


def tables(
    vocabulary_sizes: Mapping[str, int], config: HSTUConfig, *, retrieval: bool = False
) -> list[EmbeddingConfig]:
    """Return a table for each feature that becomes tokens, for `torchrec.EmbeddingCollection`.

    Args:
        vocabulary_sizes: rows of each table by feature, as in a dataset's manifest.
        config: says which features become tokens.
        retrieval: negatives are looked up in the table of the items too.

    Raises:
        ConfigError: the size of a vocabulary is missing.

    """
    keys = (*config.contextual, ITEM_ID, *((ACTION,) if config.interleave_actions else ()))
    for key in keys:
        if key not in vocabulary_sizes:
            raise ConfigError(f"no vocabulary size of {key!r}; known are those of {', '.join(vocabulary_sizes)}")
    return [
        EmbeddingConfig(
            name=_table_name(key),
            num_embeddings=vocabulary_sizes[key],
            embedding_dim=config.embedding_dim,
            feature_names=[ITEM_ID, NEGATIVE_ID] if key == ITEM_ID and retrieval else [key],
        )
        for key in keys
    ]


def _table_name(feature: str) -> str:
    """Return a feature's name in the form of a key of an nn.ModuleDict: no dots, and not like its attributes."""
    name = feature.replace(".", _MARK)
    return f"{_MARK}{name}" if hasattr(nn.ModuleDict(), name) else name


def feature_of(table: str) -> str:
    """Return the feature of a table, given its name."""
    return table.removeprefix(_MARK).replace(_MARK, ".")
