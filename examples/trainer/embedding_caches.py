"""`EmbeddingCaches`: how often rows of tables in host memory are found in their cache on the device."""

from itertools import chain
from typing import NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from evenrank.core.errors import ConfigError


class CacheUse(NamedTuple):
    """Rows that lookups found in a cache, or did not; a row counts once per lookup, however often it occurs in it."""

    tables: str  # names of those that share the cache, with commas between them
    hits: int
    misses: int


class EmbeddingCaches:
    """The caches of a model's tables on this rank: of TorchRec's kernel `fused_uvm_caching`, or of FBGEMM alone.

    FBGEMM counts on the device, in LRU caches, its default. A ConfigError if one of them does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        # TorchRec keeps lookups in lists, which do not make them submodules.
        lookups = (lookup.modules() for module in model.modules() for lookup in getattr(module, "_lookups", ()))
        found = (m for m in chain(model.modules(), *lookups) if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen))
        self._counts = {module: [0, 0] for module in found if module.lxu_cache_weights.numel()}
        if not all(module.gather_uvm_cache_stats for module in self._counts):
            raise ConfigError("a cache does not count; pass gather_uvm_cache_stats=True, in TorchRec by fused_params")

    def read(self) -> list[CacheUse]:
        """Return the use of each cache since the last call. Waits for the device, unless there is no cache."""
        uses = []
        for module, last in self._counts.items():
            counts = module.get_uvm_cache_stats()
            if counts.is_cuda:
                torch.cuda.synchronize(counts.device)  # a pipeline counts on a stream of its own
            self._counts[module] = counts.tolist()[2:4]  # distinct rows of each lookup, and those that were not cached
            rows, misses = (now - before for now, before in zip(self._counts[module], last, strict=True))
            uses.append(CacheUse(",".join(module.table_names or ("a table",)), rows - misses, misses))
        return uses
