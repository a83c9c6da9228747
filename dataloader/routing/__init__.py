"""Routing: which rank owns the row of a key, where an embedding table is sharded by rows.

`owner.py` decides on the rank, `bucketize.py` groups a batch's keys by it. `key_map.py` has the same effect on stock
TorchRec: it renumbers the rows of a table, so that TorchRec's ranges of rows spread over the ranks what a mode spreads.
"""

from evenrank.dataloader.routing.key_map import KeyMap
from evenrank.dataloader.routing.owner import MODES, Mode, hash_keys, owner_rank

__all__ = ["MODES", "KeyMap", "Mode", "hash_keys", "owner_rank"]
