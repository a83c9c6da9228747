"""Behind TorchRec's training pipeline, which pulls several batches ahead of the one that it trains."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evenrank.dataloader import LoaderConfig, SequenceBatch, build_loader
from evenrank.dataloader.balance import Balancer, HSTUCost
from tests.ranks import RankPool

COST = HSTUCost(hidden=8, heads=1, head_dim=8, layers=1)


def _model(device: torch.device) -> torch.nn.Module:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = EmbeddingBagConfig(name="table", num_embeddings=501, embedding_dim=4, feature_names=["item_id"])
            self.items = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
            self.score = torch.nn.Linear(4, 1)

        def forward(self, batch: SequenceBatch) -> tuple[torch.Tensor, SequenceBatch]:
            return self.score(self.items(batch.features).values()).sum(), batch

    assert dist.group.WORLD is not None
    return DistributedModelParallel(Model(), device=device, env=ShardingEnv.from_process_group(dist.group.WORLD))


def _train_some(rank: int, world_size: int, path: Path, num_steps: int, balanced: bool) -> dict[str, object]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    logging.disable(logging.WARNING)  # of torchrec's planner
    device = torch.device("cpu")
    model = _model(device)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    config = LoaderConfig(batch_size=8)
    loader = build_loader(path, config, rank=rank, world_size=world_size)
    source = Balancer(loader, cost=COST) if balanced else loader
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    iterator = iter(source)
    trained: list[int] = []
    for _ in range(num_steps):
        batch = pipeline.progress(iterator)
        trained += batch.sample_ids[: batch.num_real].tolist()
    state = source.state_dict(after=batch)
    ahead = loader.state_dict()["position"] - state["position"]
    if isinstance(source, Balancer):
        iterator.close()  # type: ignore[attr-defined]
        source.close()

    rest = build_loader(path, config, rank=rank, world_size=world_size)
    rest.load_state_dict(state)
    left = [sample for batch in rest for sample in batch.sample_ids[: batch.num_real].tolist()]
    return {"trained": trained, "left": left, "ahead": ahead // (8 * world_size), "samples": rest.num_samples}


@pytest.mark.parametrize("balanced", [False, True])
def test_a_state_is_that_of_the_batch_trained_last_not_of_those_pulled_ahead(
    small_dataset: Path, ranks: RankPool, balanced: bool
) -> None:
    everybody = ranks.run(2, _train_some, small_dataset, 4, balanced)
    assert all(one["ahead"] >= 2 for one in everybody)
    trained = [sample for one in everybody for sample in one["trained"]]
    assert len(trained) == 2 * 4 * 8
    left = [sample for one in everybody for sample in one["left"]]
    assert sorted(trained + left) == list(range(everybody[0]["samples"]))
