"""A Kafka topic as a log: `build_stream_loader(KafkaLog(...), config, ..., follow=True)`. Needs `confluent-kafka`.

A message is a row as JSON, {"user_id": 7, "item_id": [3, 1], "action": [0, 1], "timestamp_ms": [1795651200000, ...]},
with all other columns of the manifest. Partitions take turns:

    partition 0     0   2   4   6       record n is offset n // 2 of partition n % 2;
    partition 1       1   3             record 5 is not there yet, so the log ends at it

So producers should write to partitions in turn: the log waits for the partition that has the fewest messages. Offsets
must be consecutive: no compacted topics, and no transactions. The topic keeps messages until they are trained.
"""

import json
from collections import deque

import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, TopicPartition

from evenrank.core.errors import DataError, StateError
from evenrank.datasets import LogEnd, Manifest, SequenceStore, rows_of_table

MAX_BUFFERED = 10_000  # messages of a partition, from which on it is paused


class KafkaLog:
    """A `LogSource`; each rank makes its own, which fetches all partitions."""

    def __init__(self, servers: str, topic: str, manifest: Manifest) -> None:
        self.manifest = manifest
        columns = [column for column in manifest.columns if column.vocabulary_size != 0]
        types = {column.name: pa.type_for_alias(column.dtype) for column in columns}
        lists = {column.name: pa.list_(types[column.name]) for column in columns if column.kind == "event"}
        self._schema = pa.schema([*(types | lists).items()])
        # Positions are in the states of the loader, so the group commits none, and does nothing.
        options = {"group.id": "evenrank", "enable.auto.commit": False, "auto.offset.reset": "error"}
        self._consumer = Consumer({"bootstrap.servers": servers, **options})
        self._topic = topic
        self._num_partitions = len(self._consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        self.resume(0, self.mark(0))

    def end(self) -> LogEnd:
        """Buffer the messages that the client has fetched, and count those up to the first one that is not there."""
        for message in self._consumer.consume(MAX_BUFFERED, timeout=0.05):
            partition, value = message.partition(), message.value()
            if message.error() is not None or partition is None or value is None:
                raise KafkaException(message.error())
            if message.offset() != self._first_offsets[partition] + len(self._buffered[partition]):
                raise DataError(f"{self._topic} has a gap before offset {message.offset()} of partition {partition}")
            self._buffered[partition].append(value)
            if len(self._buffered[partition]) == MAX_BUFFERED:
                self._consumer.pause([TopicPartition(self._topic, partition)])
        ends = map(lambda first, rows: first + len(rows), self._first_offsets, self._buffered)
        return LogEnd(min(end * self._num_partitions + partition for partition, end in enumerate(ends)), False)

    def read(self, first: int, end: int) -> SequenceStore:
        """Return records first..end-1, and forget those before them."""
        for partition, messages in enumerate(self._buffered):
            while messages and self._first_offsets[partition] < self._offset(first, partition):
                messages.popleft()
                self._first_offsets[partition] += 1
            if len(messages) < MAX_BUFFERED:
                self._consumer.resume([TopicPartition(self._topic, partition)])
        rows = []
        for record in range(first, end):
            offset, partition = divmod(record, self._num_partitions)
            rows.append(json.loads(self._buffered[partition][offset - self._first_offsets[partition]]))
        table = pa.Table.from_pylist(rows, schema=self._schema)
        return rows_of_table(table, self.manifest, f"{self._topic}, records {first}..{end - 1}")

    def mark(self, position: int) -> str:
        """Return the topic and its number of partitions, which decides on the order of records."""
        return f"{self._topic} in {self._num_partitions} partitions"

    def resume(self, position: int, mark: str) -> None:
        """Fetch from a position on."""
        if mark != self.mark(position):
            raise StateError(f"the state is of {mark}, this log is {self.mark(position)}; load one of this log")
        partitions = range(self._num_partitions)
        self._first_offsets = [self._offset(position, partition) for partition in partitions]
        self._buffered: list[deque[bytes]] = [deque() for _ in partitions]
        self._consumer.assign([TopicPartition(self._topic, *place) for place in enumerate(self._first_offsets)])

    def _offset(self, position: int, partition: int) -> int:
        """Return the offset of the first record of a partition that is not before a position."""
        return -(-(position - partition) // self._num_partitions)
