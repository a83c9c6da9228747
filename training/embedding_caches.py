"""`EmbeddingCaches`: how often rows of tables in host memory are found in their cache on the device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from evenrank.core.errors import ConfigError

_UNIQUE, _MISSES = 2, 3  # among FBGEMM's counts of a cache: distinct rows of each lookup, and those that were not there


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """Rows that lookups have found in a cache; a row counts once per lookup, however often it occurs in it."""

    tables: str
    """Names of the tables that share the cache, with commas between them."""
    hits: int
    misses: int


class EmbeddingCaches:
    """The caches of a model's tables, on this rank: those of TorchRec's kernel `fused_uvm_caching`, or of FBGEMM alone.

    FBGEMM counts hits and misses on the device, of caches that keep the rows used last (LRU, its default).

    Raises:
        ConfigError: a cache does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [module for module in _parts(model) if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)]
        self._counts = {module: [0] * 6 for module in found if module.lxu_cache_weights.numel()}
        if uncounted := [_tables(module) for module in self._counts if not module.gather_uvm_cache_stats]:
            raise ConfigError(
                f"the cache of {uncounted[0]} does not count hits; pass gather_uvm_cache_stats=True to FBGEMM, "
                "in TorchRec by fused_params"
            )

    def read(self) -> list[CacheUse]:
        """Return the use of each cache since the last call. Waits for the device, unless there is no cache."""
        uses = []
        for module, last in self._counts.items():
            counts = module.get_uvm_cache_stats()
            if counts.is_cuda:
                torch.cuda.synchronize(counts.device)  # a pipeline counts on a stream of its own
            self._counts[module] = counts.tolist()
            unique, misses = (self._counts[module][index] - last[index] for index in (_UNIQUE, _MISSES))
            uses.append(CacheUse(tables=_tables(module), hits=unique - misses, misses=misses))
        return uses


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        yield module
        for lookup in getattr(module, "_lookups", ()):  # of TorchRec, which does not register them as submodules
            yield from lookup.modules()


def _tables(module: SplitTableBatchedEmbeddingBagsCodegen) -> str:
    return ",".join(module.table_names or ("a table",))
