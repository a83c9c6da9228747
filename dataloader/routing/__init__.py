"""Routing: which rank has the row of a key, where an embedding table is sharded by rows.

Stock TorchRec shards tables by ranges of rows, so `key_map.py` decides which row has which key: a loader, or
`map_features`, replaces keys by rows.
"""

from evenrank.core import optional_imports

# At their first use: some names need torch, and reports compute the loads of ranks without it.
__getattr__, __dir__, __all__ = optional_imports.attach_stub(__name__, __file__)
