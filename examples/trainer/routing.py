"""Which row of a sharded table has which key: `--routing`."""

from collections.abc import Mapping
from typing import cast

from evenrank.dataloader.routing import KeyMap, Mode
from evenrank.datasets.schema import ACTION


def make_key_maps(table_rows: Mapping[str, int], routing: str, ranks: int) -> dict[str, KeyMap]:
    """Return a KeyMap by feature; none for `continuous`, where key k has row k.

    Actions have none either: they are labels too, and their table is small.

    Args:
        table_rows: rows of each sharded table, by feature.
        routing: one of `MODES`.
        ranks: number that the tables are sharded over.

    """
    if routing == "continuous":
        return {}
    mode = cast(Mode, routing)
    return {
        name: KeyMap(num_embeddings=rows, world_size=ranks, mode=mode)
        for name, rows in table_rows.items()
        if name != ACTION
    }
