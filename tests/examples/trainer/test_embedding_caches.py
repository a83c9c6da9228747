import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    UVMCacheStatsIndex,
)
from torch import nn

from evenrank.core.errors import ConfigError
from tests.examples.sharded_model import Model, distribute, join
from tests.ranks import RankPool
from trainer.embedding_caches import CacheUse, EmbeddingCaches


class _Cached(SplitTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """FBGEMM creates caches on GPUs alone; this has the tensors of one, and its own way to read them."""

    def __init__(self, tables: list[str] | None, *, counts: bool = True) -> None:
        nn.Module.__init__(self)
        self.table_names = tables
        self.gather_uvm_cache_stats = counts
        self.lxu_cache_weights = torch.zeros(4, 2)
        self.uvm_cache_stats = torch.zeros(6, dtype=torch.int64)

    def look_up(self, *, requested: int, unique: int, misses: int) -> None:
        stats = {"num_calls": 1, "num_requested_indices": requested, "num_unique_indices": unique}
        for name, count in {**stats, "num_unique_misses": misses}.items():
            self.uvm_cache_stats = self.uvm_cache_stats.clone()  # FBGEMM replaces the tensor, too
            self.uvm_cache_stats[UVMCacheStatsIndex[name]] += count


class _Lookups(nn.Module):
    """Keeps modules as TorchRec does."""

    def __init__(self, *lookups: nn.Module) -> None:
        super().__init__()
        self._lookups = list(lookups)


def test_each_cache_counts_since_the_last_reading() -> None:
    first, second = _Cached(["items", "users"]), _Cached(None)
    first.look_up(requested=100, unique=40, misses=30)
    caches = EmbeddingCaches(nn.Sequential(_Lookups(nn.Sequential(first)), nn.Linear(2, 2), second))
    first.look_up(requested=100, unique=20, misses=5)
    assert caches.read() == [
        CacheUse(tables="a table", hits=0, misses=0),
        CacheUse(tables="items,users", hits=25, misses=35),  # all of before, too
    ]
    first.look_up(requested=9, unique=9, misses=0)
    second.look_up(requested=50, unique=8, misses=7)
    assert [(use.hits, use.misses) for use in caches.read()] == [(1, 7), (9, 0)]
    assert [(use.hits, use.misses) for use in caches.read()] == [(0, 0), (0, 0)]


def test_a_cache_that_does_not_count_is_an_error_and_tables_without_one_are_left_out() -> None:
    with pytest.raises(ConfigError, match="a cache does not count; pass gather_uvm_cache_stats=True"):
        EmbeddingCaches(_Lookups(_Cached(["items"], counts=False)))
    without = _Cached(["items"], counts=False)
    without.lxu_cache_weights = torch.zeros(0)
    assert EmbeddingCaches(without).read() == []


def _look_for_caches(rank: int, world_size: int) -> list[CacheUse]:
    device, group = join(rank, "cpu")
    model, _ = distribute(Model(), device, group)
    assert EmbeddingCaches(model).read() == []
    with pytest.MonkeyPatch.context() as patch:  # as if its table had a cache
        patch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "lxu_cache_weights", torch.zeros(1), raising=False)
        return EmbeddingCaches(model).read()


def test_the_tables_of_sharded_models_are_found(ranks: RankPool) -> None:
    failures = ranks.try_run(2, _look_for_caches)
    assert [failure.type_name for failure in failures] == ["ConfigError"] * 2
    assert all("in TorchRec by fused_params" in failure.message for failure in failures)


@pytest.mark.gpu
def test_a_cache_of_fbgemm_on_a_gpu_counts_hits() -> None:
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(4096, 4, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)],
        optimizer=EmbOptimType.EXACT_SGD,
        cache_load_factor=0.5,
        gather_uvm_cache_stats=True,
        table_names=["items"],
    )
    caches = EmbeddingCaches(nn.Sequential(tables))
    reports = []
    for rows in ([0, 1, 2, 3, 3, 3], [2, 3, 4], [2, 3, 4]):
        indices = torch.tensor(rows, device="cuda")
        tables(indices, torch.tensor([0, len(rows)], device="cuda")).sum().backward()
        reports += caches.read()
    assert [(use.hits, use.misses) for use in reports] == [(0, 4), (2, 1), (3, 0)]
    assert {use.tables for use in reports} == {"items"}


def _caches_of_torchrec(rank: int, world_size: int) -> list[str]:
    device, group = join(rank, "cuda")
    model, _ = distribute(Model(), device, group, cached=True)
    return [use.tables for use in EmbeddingCaches(model).read()]


@pytest.mark.gpu
def test_the_caches_of_sharded_tables_count(gpu_ranks: RankPool) -> None:
    assert gpu_ranks.run(1, _caches_of_torchrec) == [["item_id_table"]]
