import re
import warnings
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from evenrank.core.errors import ConfigError, RankError, StateError
from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import BalanceConfig
from evenrank.training import LossAverage, scale_loss
from evenrank.training.dmp import load_dmp, make_dmp_optimizer, save_dmp
from tests.checkpoints.resuming import COST, GLOBAL_BATCH_SIZE, ids_of
from tests.examples.trainer.test_pipelines import skip_without_kernels
from tests.ranks import RankPool

Step = tuple[list[int], float]


@torch.no_grad()
def _fill(table: Tensor) -> Tensor:
    return table.copy_(torch.linspace(-1, 1, table.numel()).reshape(table.shape))


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes: Any = {"num_embeddings": 501, "embedding_dim": 4, "feature_names": ["item_id"], "init_fn": _fill}
        table = EmbeddingConfig(name="item_table", **sizes)
        self.tables = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.score, self.frozen = nn.Linear(4, 1), nn.Linear(1, 1).requires_grad_(False)

    def forward(self, batch: SequenceBatch) -> Tensor:
        items = self.tables(batch.features)["item_id"].values()
        loss_sum: Tensor = ((self.frozen(self.score(items)) - 1) ** 2).sum()
        return loss_sum


class Job:
    """A sharded model, its optimizer and its data."""

    def __init__(self, rank: int, world_size: int, path: Path, store: Path | None = None) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        warnings.simplefilter("ignore")  # of TorchRec about PyTorch
        torch.manual_seed(0)
        model, device = Scores(), torch.device("cpu")
        if store is not None:  # on GPUs, where a job's only group is one of NCCL
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            dist.destroy_process_group()
            dist.init_process_group("nccl", f"file://{store}", world_size=world_size, rank=rank)
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
        sharder, by_rows = EmbeddingCollectionSharder(fused_params=fused), row_wise(compute_kernel="fused")
        tables = construct_module_sharding_plan(model.tables, {"item_table": by_rows}, sharder, device_type=device.type)
        plan = ShardingPlan({"tables": tables})
        self.model, self.device = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder]), device
        self.optimizer = make_dmp_optimizer(self.model, lambda parameters: torch.optim.AdamW(parameters, lr=0.05))
        config, balance = LoaderConfig(batch_size=GLOBAL_BATCH_SIZE // world_size), BalanceConfig(cost=COST)
        self.loader = build_loader(path, config, rank=rank, world_size=world_size, balance=balance)
        self.batches: Any = None

    def train(self, num_steps: int) -> list[Step]:
        """Return this rank's samples of each step, and its loss over all ranks."""
        steps, self.batches = list[Step](), self.batches or iter(self.loader)
        for loaded in islice(self.batches, num_steps):
            batch, average = loaded.to(self.device), LossAverage(device=self.device)
            self.optimizer.zero_grad()
            loss_sum = self.model(batch)
            scale_loss(loss_sum, batch).backward()
            self.optimizer.step()
            average.update(loss_sum.detach(), batch)
            steps.append((ids_of(batch), average.compute()[0]))
        self.state = self.loader.state_dict(after=batch)
        return steps


def _run(rank: int, world_size: int, path: Path, folder: Path, store: Path | None = None) -> list[Step]:
    """Save after 1 and 3 steps, with another learning rate from then on, or load; return the steps after that."""
    job = Job(rank, world_size, path, store)
    if (values := load_dmp(folder, job.model, job.optimizer)) is None:
        for count in (1, 2):
            job.train(count)
            for group in job.optimizer.param_groups:
                group["lr"] *= 0.5
            save_dmp(folder, job.model, job.optimizer, {"data": job.state, "count": count})
    else:
        assert values["count"] == 2
        job.loader.load_state_dict(values["data"])
    return job.train(3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def test_a_job_goes_on_with_tables_moments_learning_rates_and_data(
    ranks: RankPool, gpu_ranks: RankPool, small_dataset: Path, tmp_path: Path, device: str
) -> None:
    folder, numbers, is_cpu = tmp_path / "checkpoint", count(), device == "cpu"
    if not is_cpu:
        skip_without_kernels()

    def run(world_size: int) -> tuple[list[list[int]], list[float]]:
        """Return the samples and the loss of each step."""
        store, pool = (None, ranks) if is_cpu else (tmp_path / f"store{next(numbers)}", gpu_ranks)
        steps = [*zip(*pool.run(world_size, _run, small_dataset, folder, store), strict=True)]
        samples = [sorted(id_ for ids, _ in of_ranks for id_ in ids) for of_ranks in steps]
        return samples, [loss for (_, loss), *_ in steps]

    samples, losses = run(2)
    assert [path.name for path in tmp_path.iterdir() if "store" not in path.name] == ["checkpoint"]
    assert not is_cpu or run(2) == (samples, losses)  # bit for bit
    folder.rename(tmp_path / "checkpoint.old")  # as a job leaves it that is killed while it replaces a checkpoint
    for world_size in (1, 3) if is_cpu else sorted({1, 2, min(3, torch.cuda.device_count())}):
        resumed = run(world_size)
        assert resumed[0] == samples
        assert resumed[1] == pytest.approx(losses, rel=1e-6 if is_cpu else 1e-5)


def _fail(rank: int, world_size: int, path: Path, folder: Path) -> list[str]:
    """Save and load what cannot be; return what is said of each."""
    job, said = Job(rank, world_size, path), []
    model, optimizer = job.model, job.optimizer
    of_sgd = make_dmp_optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    save_dmp(folder, model, optimizer, {})
    calls: list[Callable[[], object]] = [
        lambda: save_dmp(folder, model, torch.optim.Adam(model.parameters()), {}),
        lambda: save_dmp(folder, model, optimizer.optimizers[1][1], {}),
        lambda: save_dmp(folder, model, optimizer, {"rank": rank}),
        lambda: save_dmp(folder, model, optimizer, {"rank": {rank} if rank else rank}),
        lambda: load_dmp(folder, model, of_sgd),
    ]
    for call in calls:
        with pytest.raises((ConfigError, StateError, RankError)) as raised:
            call()
        said.append(f"{raised.type.__name__}: {raised.value}")
    return said


FAULTS = [
    r"ConfigError: the optimizer, a Adam, has no names of parameters; pass make_dmp_optimizer\(",
    r"ConfigError: the optimizer lacks tables\.embeddings\.item_table\.weight; pass make_dmp_optimizer\(",
    "RankError: the hash of values differs between ranks",
    r"(ConfigError|RankError): .*values are not JSON \(.*\); pass numbers, texts, lists and dicts",
    r"StateError: .*checkpoint cannot be loaded \(rank 0: .*Missing key.*\); load one that save_dmp wrote, of this",
]


def test_what_cannot_be_saved_or_loaded_is_one_line_on_every_rank(
    ranks: RankPool, small_dataset: Path, tmp_path: Path
) -> None:
    for said in ranks.run(2, _fail, small_dataset, tmp_path / "checkpoint"):
        for line, fault in zip(said, FAULTS, strict=True):
            assert (bool(re.match(fault, line)), line.isprintable()) == (True, True), line
