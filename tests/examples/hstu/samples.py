"""Sequences, batches of samples given as lists or drawn, models in float64, and steps that must not wait for a GPU."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import SequenceBatch
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from hstu import HSTUConfig, HSTURanking, Sequences, tables

SIZES = {"user_id": 10, "tags": 6, "item_id": 30, "action": 8}
_SHAPE: dict[str, Any] = {"embedding_dim": 6, "hidden": 8, "heads": 4, "head_dim": 4, "layers": 2}
CONFIG = HSTUConfig(max_length=50, contextual=("user_id", "tags"), position_buckets=12, dropout=0.0, **_SHAPE)
NUM_TASKS = 3
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def make_sequences(
    lengths: Sequence[int], contextual: Sequence[int], candidates: Sequence[int], *, device: str = "cpu"
) -> Sequences:
    """Return where samples of the given numbers of tokens are."""
    counts = torch.tensor([lengths, contextual, candidates], dtype=torch.int64).to(device)
    offsets = torch.cat([counts.new_zeros(1), counts[0].cumsum(0)])
    of_host: dict[str, Any] = {"num_tokens": sum(lengths), "max_length": max(lengths, default=0)}
    return Sequences(offsets=offsets, num_contextual=counts[1], num_candidates=counts[2], **of_host)


Sample = Mapping[str, Any]  # lists of a sample, by feature and `labels`, and `num_candidates`; none of padding


def make_batch(samples: Sequence[Sample], *, rows: int | None = None) -> SequenceBatch:
    """Return a batch of samples and padding."""
    padded = [*samples, *[dict[str, Any]()] * ((rows or len(samples)) - len(samples))]
    features, limits = jagged({key: [sample.get(key, []) for sample in padded] for key in SIZES})
    labels, label_limits = jagged({"label": [sample.get("labels", []) for sample in padded]})
    return SequenceBatch(
        batch_size=len(padded),
        num_real=len(samples),
        loss_tokens=labels.length_per_key()[0],
        max_lengths=limits | label_limits,
        features=features,
        labels=labels,
        num_candidates=torch.tensor([sample.get("num_candidates", 0) for sample in padded]),
        sample_ids=torch.tensor([row if row < len(samples) else -1 for row in range(len(padded))]),
    )


def jagged(rows_by_key: Mapping[str, list[list[int]]]) -> tuple[KeyedJaggedTensor, dict[str, int]]:
    """Return a tensor of these rows, and the longest of each key."""
    lengths = np.array([[len(row) for row in rows] for rows in rows_by_key.values()])
    values = [value for rows in rows_by_key.values() for row in rows for value in row]
    limits = {key: int(counts.max()) for key, counts in zip(rows_by_key, lengths, strict=True)}
    return keyed_jagged_tensor(list(rows_by_key), torch.tensor(values, dtype=torch.int64), lengths), limits


def random_samples(count: int, *, seed: int = 0, predict: str = "candidates") -> list[Sample]:
    """Draw samples with histories of 0 to 7 items; `predict` is `candidates`, `candidates-with-actions`, `history`."""
    rng, num_candidates = np.random.default_rng(seed), 2 if predict.startswith("candidates") else 0
    samples = list[Sample]()
    for _ in range(count):
        history = int(rng.integers(0, 8))
        lengths = (1, int(rng.integers(0, 4)), history + num_candidates, history + num_candidates)
        sample: dict[str, Any] = {
            key: rng.integers(0, SIZES[key], length).tolist() for key, length in zip(SIZES, lengths, strict=True)
        }
        sample |= {"num_candidates": num_candidates, "labels": sample["action"][history if num_candidates else 0 :]}
        sample["action"] = sample["action"][: history if predict == "candidates" else None]
        samples.append(sample)
    return samples


def make_ranking(config: HSTUConfig = CONFIG, **options: Any) -> HSTURanking:
    """Return a model with the same weights each time; in float64, but for what its tables return."""
    torch.manual_seed(0)
    embeddings = EmbeddingCollection(tables=tables(SIZES, config))
    return HSTURanking(embeddings, config, **{"num_tasks": NUM_TASKS, **options}).double()


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters, and set them to none."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    model.zero_grad()
    return gradients


def run_quietly(step: Callable[[], Any]) -> Any:
    """Run a step on a GPU twice; in the second one, the host must not wait for the device."""
    for mode in ("default", "error"):  # the first one compiles and loads libraries
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            result = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return result
