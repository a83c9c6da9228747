"""`Embeddings`: large tables sharded by rows over the ranks, small ones replicated on each.

    features --+--> sharded:     ids to the ranks that hold their rows, lookup, embeddings back --+--> one dict
               +--> replicated:  lookup on a side stream meanwhile -------------------------------+

`shard` distributes the model that they are part of, and `make_optimizer` makes one optimizer of all parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class Embeddings(nn.Module):
    """Embedding tables with the interface of `torchrec.EmbeddingCollection`, of which `shard` shards the large ones.

    Args:
        tables: all of the same embedding_dim.
        min_sharded_rows: tables with at least so many rows are sharded, the others replicated.
        device: where the tables are created; with `meta`, each rank creates its rows in `shard`, and no table is ever
            in one piece.

    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], *, min_sharded_rows: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        large = [table for table in tables if table.num_embeddings >= min_sharded_rows]
        small = [table for table in tables if table.num_embeddings < min_sharded_rows]
        where = torch.device(device)
        self.sharded = EmbeddingCollection(tables=large, device=where) if large else None
        self.replicated = _ReplicatedTables(small, where) if small else None

    def forward(self, features: KeyedJaggedTensor) -> Mapping[str, JaggedTensor]:
        """Return the embeddings of each feature that a table has: values [ids of the feature, embedding_dim].

        Features may have keys without a table. With the lengths of its keys known to the host, as those of batches
        are, nothing here waits for the device but TorchRec's exchange of how many ids each rank sends.
        """
        ready = _mark(features)
        # Returns when the lookup and the all-to-all of the embeddings have been started. TorchRec's pipelines trace as
        # far as this call, to start its ids' all-to-all a batch ahead.
        sharded = {} if self.sharded is None else self.sharded(features)
        replicated = {} if self.replicated is None else self.replicated(features, ready)
        return _merge(sharded, replicated)


class _ReplicatedTables(nn.Module):
    """Tables that all ranks have in full; DistributedDataParallel averages their gradients."""

    def __init__(self, tables: list[EmbeddingConfig], device: torch.device) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(tables=tables, device=device)

    def forward(self, features: KeyedJaggedTensor, ready: torch.cuda.Event | None) -> dict[str, JaggedTensor]:
        """Return the embeddings; on a GPU they are looked up on a side stream, which waits for `ready` alone."""
        if ready is None:
            return dict(self.tables(features))
        current = torch.cuda.current_stream()
        side = _side_stream(current.device)
        # Views of the current stream, so that gradients are accumulated there, where DistributedDataParallel awaits
        # them; backward synchronizes the streams.
        weights = {name: weight.view_as(weight) for name, weight in self.tables.named_parameters()}
        with torch.cuda.stream(side):
            side.wait_event(ready)
            found: dict[str, JaggedTensor] = functional_call(self.tables, weights, (features,))
        features.record_stream(side)
        for jagged in found.values():
            jagged.values().record_stream(current)
        current.wait_stream(side)
        return found


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# Functions that TorchRec's pipelines do not trace into.
@torch.fx.wrap
def _mark(features: KeyedJaggedTensor) -> torch.cuda.Event | None:
    """Return an event after which the features, and all weights, are ready; None on the CPU."""
    if features.values().device.type != "cuda":
        return None
    features.to_dict()  # the batch caches this, so it belongs on the current stream
    event: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return event


@torch.fx.wrap
def _merge(sharded: Mapping[str, JaggedTensor], replicated: Mapping[str, JaggedTensor]) -> Mapping[str, JaggedTensor]:
    return {**sharded, **replicated}  # awaits the all-to-all


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    fused: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    cached: bool = False,
) -> DistributedModelParallel:
    """Distribute a model that contains `Embeddings`. Collective: every rank must call this.

    The gradients of all parameters are averaged over the ranks, those of the sharded tables included. Tables that are
    not on the device `meta` keep their values, which must be the same on all ranks.

    Args:
        model: is changed; use the returned one.
        device: where to train.
        fused: FBGEMM's options of the sharded tables, which backward updates: `optimizer` (an EmbOptimType; on the CPU
            EXACT_SGD or an Adagrad), `learning_rate`, and so on.
        group: the data-parallel ranks, over NCCL if the device is a GPU; None: the default process group.
        cached: keep the sharded tables in host memory, and rows in use in a cache on the device, which the pipeline
            `prefetch` fills ahead.

    """
    env = ShardingEnv.from_process_group(group or dist.group.WORLD)
    sharder = EmbeddingCollectionSharder(fused_params={**fused, "prefetch_pipeline": True} if cached else dict(fused))
    by_rows = row_wise(compute_kernel="fused_uvm_caching" if cached else "fused")
    plan = ShardingPlan(
        {
            path: construct_module_sharding_plan(
                collection,
                {table.name: by_rows for table in collection.embedding_configs()},
                sharder,
                local_size=get_local_size(env.world_size),
                world_size=env.world_size,
                device_type=device.type,
            )
            for path, collection in _sharded_collections(model).items()
        }
    )
    # Parameters without a plan go into DistributedDataParallel.
    return DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=[sharder])


def _sharded_collections(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Return the collections to shard, by their path in the model."""
    return {
        f"{path}.sharded".lstrip("."): module.sharded
        for path, module in model.named_modules()
        if isinstance(module, Embeddings) and module.sharded is not None
    }


def make_optimizer(
    model: DistributedModelParallel, dense: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> CombinedOptimizer:
    """Return an optimizer of all parameters, whose state is by their names.

    Args:
        model: from `shard`. Its sharded tables are updated during backward; stepping passes their learning rate on.
        dense: makes the optimizer of all other parameters, as `lambda parameters: Adam(parameters, lr=1e-3)`.

    """
    others = dict(in_backward_optimizer_filter(model.named_parameters()))
    return CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(others, dense)])
