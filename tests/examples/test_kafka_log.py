"""The recipe for Kafka, with its client and the broker that the client's library, librdkafka, has for tests."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from evenrank.core.errors import DataError, StateError
from evenrank.dataloader import LoaderConfig, StreamConfig, build_stream_loader
from evenrank.datasets import LogSource, describe_log
from tests.dataloader.batch_helpers import ids_of, rows_of, through_json
from tests.datasets.logs import MANIFEST, SIZES, items_of, table_of

kafka = pytest.importorskip("confluent_kafka", reason="a host without Kafka's client")
KafkaLog = pytest.importorskip("recipes.kafka_log").KafkaLog
NUM_PARTITIONS = 4  # of each topic of the broker


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """Return the address of a broker."""
    client = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = client.list_topics(timeout=60).brokers.values()
    yield f"{broker.host}:{broker.port}"
    del client  # the broker is a thread of it


def _await_records(log: LogSource, num_records: int) -> None:
    while log.end().position < num_records:
        pass


def _produce(servers: str, topic: str, records: range) -> None:
    """Write records to a topic, which asking for it makes."""
    producer = kafka.Producer({"bootstrap.servers": servers})
    while len(producer.list_topics(topic, timeout=60).topics[topic].partitions) < NUM_PARTITIONS:
        pass
    for record, row in zip(records, table_of(records).to_pylist(), strict=True):
        row["timestamp_ms"] = [record] * len(row["item_id"])
        producer.produce(topic, json.dumps(row).encode(), partition=record % NUM_PARTITIONS)
    assert producer.flush(60) == 0


def test_records_of_a_topic_come_in_turns_of_its_partitions(servers: str) -> None:
    _produce(servers, "turns", range(0))
    log = KafkaLog(servers, "turns", MANIFEST)
    assert isinstance(log, LogSource)
    assert log.end() == (0, False)
    assert log.read(0, 0).columns["share"].dtype == "float32"
    _produce(servers, "turns", range(8))
    _produce(servers, "turns", range(9, 10))  # record 8 is not there yet
    _await_records(log, 8)
    store = log.read(2, 8)
    assert store.columns["user_id"].tolist() == [2, 3, 4, 5, 6, 7]
    assert store.columns["item_id"].tolist() == [item for record in range(2, 8) for item in items_of(record)]
    _produce(servers, "turns", range(8, 9))
    for position in range(10):
        resumed = KafkaLog(servers, "turns", MANIFEST)
        resumed.resume(position, log.mark(position))
        _await_records(resumed, 10)
        assert resumed.read(position, 10).columns["user_id"].tolist() == [*range(position, 10)]
    with pytest.raises(StateError, match="is of other in 3 partitions, this log is turns in 4 partitions"):
        log.resume(0, "other in 3 partitions")
    small = KafkaLog(servers, "turns", describe_log({**SIZES, "item_id": 9}))
    _await_records(small, 10)
    with pytest.raises(DataError, match=r"turns, records 8\.\.9: item_id has 10, which vocabulary_sizes"):
        small.read(8, 10)


def _trained(servers: str, num_ranks: int, state: Any, num_steps: int) -> tuple[list[int], Any]:
    """Return the records that ranks read in some steps, and the state after them."""
    config, stream, trained = LoaderConfig(batch_size=4, order="rows"), StreamConfig(poll_seconds=0.01), list[int]()
    for rank in range(num_ranks):
        log = KafkaLog(servers, "training", MANIFEST)
        loader = build_stream_loader(log, config, stream, rank=rank, world_size=num_ranks, follow=True)
        if state is not None:
            loader.load_state_dict(through_json(state))
        for batch in islice(loader, num_steps):
            assert rows_of(batch.features, "item_id")[: batch.num_real] == [items_of(one) for one in ids_of(batch)]
            trained += ids_of(batch)
    return trained, loader.state_dict()


def test_ranks_train_each_message_once_over_a_resumption(servers: str) -> None:
    _produce(servers, "training", range(300))
    first, state = _trained(servers, 2, None, 10)
    second, _ = _trained(servers, 3, state, 8)
    assert sorted(first + second) == list(range(10 * 8 + 8 * 12))
