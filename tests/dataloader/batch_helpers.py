"""Batches as lists, batches of anyone's samples, and states: changed, and as formats of checkpoints return them."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from evenrank.dataloader import JaggedCollate, dense, jagged
from evenrank.dataloader.state.checks import StateFormat


def ids_of(batch: Any) -> list[int]:
    """Return the ids of the samples of a batch, without padding."""
    ids: list[int] = batch.sample_ids[: batch.num_real].tolist()
    return ids


def all_ids(batches: Iterable[Any]) -> list[int]:
    return [sample for batch in batches for sample in ids_of(batch)]


def rows_of(jagged: Any, key: str) -> list[list[int]]:
    """Return each row of a key of a KeyedJaggedTensor, including padding rows."""
    feature = jagged[key]
    return [row.tolist() for row in torch.split(feature.values(), feature.lengths().tolist())]


COLLATE = JaggedCollate({"item_id": jagged(), "sample_ids": dense(dtype=torch.int64, shape=())})


def nodes_over(samples: Sequence[dict[str, Any]], batch_size: int) -> Any:
    """Return nodes of torchdata that make batches of samples."""
    from torchdata import nodes

    source = nodes.MapStyleWrapper(dict(enumerate(samples)), SequentialSampler(samples))
    return nodes.Mapper(nodes.Batcher(source, batch_size, drop_last=False), COLLATE)


def with_changes(state_format: StateFormat, state: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a state with other entries, and the checksum of these."""
    return state_format.make(**{name: {**state, **changes}[name] for name in state_format.fields})


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
