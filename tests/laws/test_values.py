"""Law 6: every sample arrives with its values, bit for bit; what is sent to another rank too."""

from pathlib import Path
from typing import Any

import pytest

from evenrank.dataloader.balance.config import EXCHANGES
from tests.laws.kinds import ALONE, BALANCED, KINDS, cells, has
from tests.laws.making import Job
from tests.laws.running import Part, Pool, run, see_values
from tests.ranks import RankPool


def see_epoch_and_values(batch: Any) -> tuple[int, Any]:
    return batch.epoch, see_values(batch)


def check(pool: Pool, data: Path, job: Job) -> None:
    epochs = 2 if has(job.kind, "epochs") else 1
    samples = [KINDS[job.kind].samples(data, job, epoch) for epoch in range(epochs)]
    for ran in run(pool, data, job, Part(epochs=epochs), see_epoch_and_values):
        for epoch, rows in ran.batches:
            for sample, values in rows:
                if sample >= 0:
                    assert values == samples[epoch][sample]
                else:
                    assert not any(any(value) for value in values.values())


@pytest.mark.parametrize(("kind", "way"), cells(*ALONE))
def test_samples_have_the_values_of_the_data(data: Path, kind: str, way: str) -> None:
    workers = 2 if has(kind, "threads") else 0
    for world_size, batch_size in ((1, 7), (3, 4)):
        check(None, data, Job(kind=kind, way=way, world_size=world_size, batch_size=batch_size, workers=workers))


@pytest.mark.parametrize(("kind", "way"), cells(*BALANCED))
def test_the_bytes_received_are_the_bytes_sent(ranks: RankPool, data: Path, kind: str, way: str) -> None:
    for world_size, exchange in zip((3, 2), EXCHANGES, strict=True):
        check(ranks, data, Job(kind=kind, way=way, world_size=world_size, exchange=exchange))
