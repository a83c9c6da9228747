"""`Embeddings`: large tables sharded by rows over the ranks, small ones replicated on each.

`shard` distributes the model that they are part of; `make_dmp_optimizer` makes one optimizer of all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class Embeddings(nn.Module):
    """Embedding tables with the interface of `torchrec.EmbeddingCollection`, of which `shard` shards the large ones.

    All have the same embedding_dim; those with at least `min_sharded_rows` rows are sharded, the others replicated. On
    the device `meta`, each rank creates its rows of a sharded table in `shard`, and no table is ever in one piece.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], *, min_sharded_rows: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        large = [table for table in tables if table.num_embeddings >= min_sharded_rows]
        small = [table for table in tables if table.num_embeddings < min_sharded_rows]
        self.equal_rows = EqualRows()
        self.sharded = EmbeddingCollection(tables=large, device=torch.device(device)) if large else None
        self.replicated = EmbeddingCollection(tables=small) if small else None

    def forward(self, features: KeyedJaggedTensor) -> Mapping[str, JaggedTensor]:
        """Return the embeddings of each feature that a table has: values [ids of the feature, embedding_dim].

        Features may have keys without a table. With the lengths of its keys known to the host, as those of batches
        are, nothing here waits for the device but TorchRec's exchange of how many ids each rank sends.
        """
        # Returns when the lookup and the all-to-all of the embeddings have been started. TorchRec's pipelines trace as
        # far as this call, to start its ids' all-to-all a batch ahead.
        sharded = {} if self.sharded is None else self.sharded(self.equal_rows(features))
        replicated = {} if self.replicated is None else self.replicated(features)
        return _merge(features, sharded, replicated)


@torch.fx.wrap  # TorchRec's pipelines do not trace into it
def _merge(
    features: KeyedJaggedTensor, sharded: Mapping[str, JaggedTensor], replicated: Mapping[str, JaggedTensor]
) -> Mapping[str, JaggedTensor]:
    """Await the all-to-all, and return all embeddings in rows of the samples."""
    samples = features.to_dict()
    in_rows = {
        name: JaggedTensor(values=jagged.values(), lengths=samples[name].lengths(), offsets=samples[name].offsets())
        for name, jagged in sharded.items()
    }
    return {**in_rows, **replicated}


EQUAL_ROWS = 1024
"""Of each key, on every rank: enough for all multiprocessors, and few enough for their lengths to be quickly sent."""


class EqualRows(nn.Module):
    """The ids of a batch in many rows of equal length; no parameters, so that pipelines can run it a batch ahead.

        samples     a b c d e f | g            h i |                  2 keys, 2 samples
        equal rows  a b c | d e | f g          h | i |                3 rows

    FBGEMM's and TorchRec's kernels divide their work by rows, so that a row of 4,096 ids takes one group of threads far
    longer than all others need together. Ids are looked up one by one, in the same order, however they are divided.
    """

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return features with the same values of each key, and `EQUAL_ROWS` rows instead of samples."""
        counts = features.length_per_key()
        row = torch.arange(EQUAL_ROWS, device=features.values().device)
        # The first rows get what is left over.
        lengths = [(row < count % EQUAL_ROWS).to(features.lengths().dtype) + count // EQUAL_ROWS for count in counts]
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            lengths=torch.cat(lengths),
            stride=EQUAL_ROWS,
            length_per_key=counts,
            offset_per_key=features.offset_per_key(),
        )


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    fused: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    cached: bool = False,
    seed: int = 0,
) -> DistributedModelParallel:
    """Distribute a model, and shard the large tables of its `Embeddings`. Collective: every rank must call this.

    The gradients of all parameters are averaged over the ranks, those of the sharded tables included. Tables that are
    not on the device `meta` keep their values, which must be the same on all ranks.

    Args:
        model: is changed; use the returned one.
        device: where to train.
        fused: FBGEMM's options of the sharded tables, which backward updates: `optimizer` (an EmbOptimType; on the CPU
            EXACT_SGD or an Adagrad), `learning_rate`, and so on.
        group: all ranks, over NCCL if the device is a GPU; None: the default process group.
        cached: keep the sharded tables in host memory, and rows in use in a cache on the device, which the pipeline
            `prefetch` fills ahead.
        seed: of tables on the device `meta`. Their initial values depend on it, the table and the row alone, not on the
            number of ranks: see `fill_rows`.
    """
    sharder = EmbeddingCollectionSharder(fused_params={**fused, **({"prefetch_pipeline": True} if cached else {})})
    by_rows = row_wise(compute_kernel="fused_uvm_caching" if cached else "fused")
    collections = {
        f"{path}.sharded".lstrip("."): module.sharded
        for path, module in model.named_modules()
        if isinstance(module, Embeddings) and module.sharded is not None
    }
    plan = ShardingPlan({})
    for path, collection in collections.items():
        plan.plan[path] = construct_module_sharding_plan(
            collection,
            {table.name: by_rows for table in collection.embedding_configs()},
            sharder,
            device_type=device.type,
        )
    env = ShardingEnv.from_process_group(group or dist.distributed_c10d._get_default_group())
    parallel = DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=[sharder])
    for path, collection in collections.items():
        if collection.device.type == "meta":
            for table in collection.embedding_configs():
                mine = plan.plan[path][table.name].sharding_spec.shards[dist.get_rank()]
                rows = parallel.module.get_parameter(f"{path}.embeddings.{table.name}.weight")
                fill_rows(rows, table, first_row=mine.shard_offsets[0], seed=seed)
    return parallel


BLOCK_ROWS = 1 << 16
"""Rows that are drawn together; where a part begins or ends within a block, the rest of the block is discarded."""


@torch.no_grad()
def fill_rows(rows: Tensor, table: EmbeddingConfig, *, first_row: int, seed: int) -> None:
    """Fill rows of a table, [n, embedding_dim], with values that depend on the seed, the table's name and the row.

    The table is drawn in blocks, each from a random generator of its own, so any part can be drawn without the rest.
    On CPU and GPU these are different values. The random states are left as they were.
    """
    assert table.init_fn is not None
    on_gpu = rows.device.type == "cuda"
    with torch.random.fork_rng([rows.device] if on_gpu else []):
        # Not torch.manual_seed, which seeds all devices, of which one is restored.
        generator = torch.cuda.default_generators[rows.device.index] if on_gpu else torch.default_generator
        for block in range(first_row // BLOCK_ROWS, -(-(first_row + len(rows)) // BLOCK_ROWS)):
            entropy = np.random.SeedSequence((seed, block, *table.name.encode()))
            generator.manual_seed(int(entropy.generate_state(1)[0]))  # 32 bits, all that the generator of the CPU uses
            start = block * BLOCK_ROWS
            drawn = rows.new_empty(min(BLOCK_ROWS, table.num_embeddings - start), table.embedding_dim)
            table.init_fn(drawn)
            begin, end = max(start, first_row), min(start + len(drawn), first_row + len(rows))
            rows[begin - first_row : end - first_row] = drawn[begin - start : end - start]
