import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenrank.dataloader import LoaderConfig, RandomBatches
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.batches.schema import schema_of
from tests.dataloader.balance.costs import one_per_sample
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.batches.test_tensors import MODES
from tests.dataloader.rich_batch import rich_batch, samples_of
from tests.ranks import RankPool


def _train(rank: int, world_size: int, mode: str, exchange: str, on_gpus: bool) -> list[Any]:
    """Return the samples of two epochs, and the gradients of an embedding table.

    One rank has fewer batches, so that empty ones are made, and batches are padded.
    """
    trained: list[Any] = []
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    table = torch.nn.Embedding(97, 2, device=device)
    torch.nn.init.ones_(table.weight)
    data = LoaderConfig(batch_size=6, max_history_length=50)
    rich = [rich_batch([[(1, 2), (3, 4)]] * (2 + rank), first_id=10 * rank)] * 2
    with MODES.get(mode, contextlib.nullcontext)():
        loader = list(RandomBatches(data, num_batches=3 - rank, rank=rank, world_size=world_size))
        config = BalanceConfig(cost=one_per_sample, exchange=exchange)
        with (
            Balancer(loader, config, device=device) as balancer,
            Balancer(rich, replace(config, batch_size=5), device=device) as rich_balancer,
        ):
            for batch in (*balancer, *balancer):
                trained.append((ids_of(batch), rows_of(batch.features, "item_id"), str(batch.features.device())))
                with torch.inference_mode(False), torch.enable_grad():
                    (table(batch.features["item_id"].values() % 97) * batch.num_real).sum().backward()
            for batch in rich_balancer:
                trained.append((samples_of(batch.to("cpu")), batch.matrix.tolist(), schema_of(batch.to("cpu"))))
                with torch.inference_mode(False):
                    batch.ids.add_(1)  # which tensors of the inference mode do not allow
    assert table.weight.grad is not None
    return [*trained, table.weight.grad.tolist()]


@pytest.mark.parametrize(
    ("exchange", "on_gpus"),
    [("all-to-all", False), ("all-gather", False), pytest.param("all-to-all", True, marks=pytest.mark.multi_gpu)],
)
def test_modes_of_pytorch_change_nothing(ranks: RankPool, exchange: str, on_gpus: bool) -> None:
    expected = ranks.run(2, _train, "none", exchange, on_gpus)
    for mode in MODES:
        assert ranks.run(2, _train, mode, exchange, on_gpus) == expected, mode
