from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from evenrank.dataloader import ElasticLoader, ElasticSampler, LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from tests.dataloader.balance.costs import item_tokens
from tests.dataloader.own_samples import COLLATE

BALANCE = BalanceConfig(cost=item_tokens)
SAMPLES: Any = [{"item_id": [1] * (index % 5 + 1), "sample_ids": index} for index in range(20)]
LENGTHS = {"item_id": [index % 5 + 1 for index in range(20)]}


def _sampler(**options: Any) -> ElasticSampler:
    return ElasticSampler(len(SAMPLES), batch_size=4, rank=0, world_size=1, **options)


def _make(kind: str, path: Path) -> Any:
    """Return a loader of 5 or more batches that are balanced."""
    config = LoaderConfig(batch_size=12)
    if kind == "loader":
        return build_loader(path, config, rank=0, world_size=1, balance=BALANCE)
    if kind == "balancer of a loader":
        return Balancer(build_loader(path, config, rank=0, world_size=1), BALANCE)
    if kind == "sampler":
        sampler = _sampler(lengths=LENGTHS, balance=BALANCE)
        return ElasticLoader(DataLoader(SAMPLES, batch_sampler=sampler, collate_fn=COLLATE))
    if kind == "balancer of a sampler":
        return Balancer(DataLoader(SAMPLES, batch_sampler=_sampler(), collate_fn=COLLATE), BALANCE)
    return Balancer(StatefulDataLoader(SAMPLES, batch_size=4, collate_fn=COLLATE), BALANCE)


@pytest.mark.parametrize(
    "kind", ["loader", "balancer of a loader", "sampler", "balancer of a sampler", "balancer of a stateful loader"]
)
def test_an_epoch_that_is_left_is_named_when_the_next_begins(
    small_dataset: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    loader = _make(kind, small_dataset)

    def left() -> list[str]:
        found = [record.message for record in caplog.records if "was left" in record.message]
        caplog.clear()
        return found

    for _ in range(2):  # also up to the last batch alone, as trainers do that know the length
        list(loader)
        list(islice(loader, len(loader)))
    list(islice(loader, 2))
    loader.load_state_dict(loader.state_dict())
    list(loader)
    assert left() == []
    *_, last = islice(loader, len(loader) - 1)
    assert left() == []
    next(iter(loader))
    (message,) = left()
    assert message.startswith(f"epoch {last.epoch} was left at position {last.position},")
