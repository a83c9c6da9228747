"""`remap`: moves the rows of a table from where one KeyMap has put them to where another one looks for them."""

import torch
from torch import Tensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader.routing.key_map import KeyMap


def remap(table: Tensor, before: KeyMap | None, after: KeyMap | None) -> Tensor:
    """Return a table in which `after` finds the rows that `before` finds in this one: new[after(k)] = old[before(k)].

    Weights and what an optimizer keeps for each row have to be moved alike.

    Args:
        table: [num_embeddings, ...], in one piece, on any device.
        before: of the job that has trained it; None: `continuous`, key k in row k.
        after: of the job that goes on with it; None: `continuous`.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        ConfigError: a KeyMap is for a table of another size.

    """
    num_rows = len(table) if table.dim() else 0
    for name, key_map in (("before", before), ("after", after)):
        if key_map is not None and key_map.num_embeddings != num_rows:
            raise ConfigError(
                f"{name} is for num_embeddings={key_map.num_embeddings}, the table has the shape {list(table.shape)}; "
                "pass the KeyMap of this table"
            )
    rows = torch.arange(num_rows, device=table.device)
    keys = rows if after is None else after.inverse(rows)
    return table.detach().index_select(0, keys if before is None else before(keys))
