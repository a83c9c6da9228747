from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchrec import EmbeddingCollection

from evenrank.dataloader import SequenceBatch
from evenrank.dataloader.balance import HSTUCost
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.training import batch_work
from evenrank.training.flops import hstu_flops, hstu_pairs
from hstu import HSTUConfig, HSTURanking, tables

SHAPE: dict[str, Any] = {"hidden": 16, "heads": 2, "head_dim": 12}
OPTIONS: dict[str, Any] = {"max_length": 20, "position_buckets": 8, "attention": "padded", "contextual": ("user_id",)}
CONFIG = HSTUConfig(**SHAPE, **OPTIONS, embedding_dim=8, layers=3)


def batch_of(lengths: Mapping[str, list[int]], candidates: list[int], labels: list[int] | None) -> SequenceBatch:
    """Return a batch of zeros with lengths [B] per key, and labels per row or none."""
    rows = np.array(list(lengths.values()))
    loss_tokens = int((np.array(lengths["item_id"]) - 1).clip(0).sum()) if labels is None else sum(labels)
    of_labels = torch.zeros(loss_tokens, dtype=torch.int64)
    return SequenceBatch(
        batch_size=rows.shape[1],
        num_real=rows.shape[1],
        loss_tokens=loss_tokens,
        max_lengths={key: max(values) for key, values in lengths.items()},
        features=keyed_jagged_tensor(list(lengths), torch.zeros(rows.sum(), dtype=torch.int64), rows),
        labels=None if labels is None else keyed_jagged_tensor(["label"], of_labels, np.array([labels])),
        num_candidates=torch.tensor(candidates),
        sample_ids=torch.arange(rows.shape[1]),
    )


# 4 samples of a user, 3 items and 2 or 3 actions each: candidates without and with actions, and labels of histories.
@pytest.mark.parametrize(
    ("actions", "candidates", "labels", "sees_history"), [(2, 1, 1, True), (3, 1, 1, True), (3, 0, 3, False)]
)
def test_flops_of_the_example_are_those_that_torch_counts(
    actions: int, candidates: int, labels: int, sees_history: bool
) -> None:
    lengths = {"user_id": [1] * 4, "item_id": [3] * 4, "action": [actions] * 4}
    batch = batch_of(lengths, [candidates] * 4, [labels] * 4)
    sizes = {"user_id": 3, "item_id": 5, "action": 4}
    embeddings = EmbeddingCollection(tables=tables(sizes, CONFIG))
    model = HSTURanking(embeddings, CONFIG, num_tasks=2)
    head = [CONFIG.hidden, CONFIG.hidden, 2]
    embedding = (CONFIG.embedding_dim, CONFIG.hidden, CONFIG.hidden)
    work = batch_work(batch, interleave_actions=True, contextual=("user_id",))
    flops = hstu_flops(**SHAPE, layers=CONFIG.layers, embedding=embedding, head=head).of(work)
    # The padded reference computes all pairs of a sample, whether a token sees the other or not.
    length, own = 4 + actions, candidates * (2 if actions == 3 else 1)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[0, : length - own] |= sees_history
    mask[:, length - own :] &= torch.eye(length, dtype=torch.bool)[:, length - own :]
    masked = 4 * int((~mask).sum()) * CONFIG.layers * CONFIG.heads * CONFIG.head_dim
    with FlopCounterMode(display=False) as forward:
        loss_sums, _ = model(batch)
    with FlopCounterMode(display=False) as backward:
        loss_sums.sum().backward()
    assert flops.forward + 4 * masked == forward.get_total_flops()
    assert flops.backward + 8 * masked == backward.get_total_flops()


@pytest.mark.parametrize("interleave_actions", [False, True])
@pytest.mark.parametrize("actions", [[3, 5, 0], [4, 7, 0]], ids=["of the history", "of all items"])
def test_the_work_of_a_batch_has_the_tokens_that_costs_count(interleave_actions: bool, actions: list[int]) -> None:
    lengths = {"gender": [1, 1, 0], "genres": [0, 2, 0], "item_id": [4, 7, 0], "action": actions}
    candidates = [1, 2, 0]
    keys: Any = {"interleave_actions": interleave_actions, "contextual": ("gender", "genres")}
    batch = batch_of(lengths, candidates, candidates)
    work = batch_work(batch, **keys)
    assert batch_work(batch.replace(labels=None, float_labels=batch.labels), **keys) == work
    cost = HSTUCost(**SHAPE, layers=1, **keys)
    arrays = {key: np.array(values) for key, values in lengths.items()}
    tokens = torch.from_numpy(cost.tokens(arrays))
    of_candidates = torch.from_numpy(cost.candidate_tokens(arrays, np.array(candidates)))
    pairs = hstu_pairs(tokens - of_candidates, torch.tensor([1, 3, 0]), of_candidates).sum()
    assert (work.tokens, work.pairs, work.predictions) == (tokens.sum(), pairs, 3)
