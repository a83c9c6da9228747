from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from evenrank.dataloader import SequenceBatch
from evenrank.dataloader.balance import HSTUCost
from evenrank.training import batch_work
from evenrank.training.flops import hstu_flops, hstu_pairs
from tests.examples.hstu.samples import CONFIG, SIZES, make_batch, make_ranking

Lengths = dict[str, list[int]]  # of each sample, by key
SHAPE: dict[str, Any] = {"hidden": CONFIG.hidden, "heads": CONFIG.heads, "head_dim": CONFIG.head_dim}


def _batch_of(lengths: Lengths, candidates: list[int], labels: list[int]) -> SequenceBatch:
    rows = [
        {key: [0] * length for key, length in zip(lengths, row, strict=True)}
        for row in zip(*lengths.values(), strict=True)
    ]
    others = [{"num_candidates": n, "labels": [0] * m} for n, m in zip(candidates, labels, strict=True)]
    return make_batch([row | other for row, other in zip(rows, others, strict=True)])


# 4 samples of a user, 3 items and 2 or 3 actions each: candidates without and with actions, and labels of histories.
@pytest.mark.parametrize(
    ("actions", "candidates", "labels", "sees_history"), [(2, 1, 1, True), (3, 1, 1, True), (3, 0, 3, False)]
)
def test_flops_of_the_example_are_those_that_torch_counts(
    actions: int, candidates: int, labels: int, sees_history: bool
) -> None:
    batch = _batch_of({"user_id": [1] * 4, "item_id": [3] * 4, "action": [actions] * 4}, [candidates] * 4, [labels] * 4)
    config = replace(CONFIG, attention="padded", contextual=("user_id",))
    head, embedding = [config.hidden, config.hidden, 3], (config.embedding_dim, config.hidden, config.hidden)
    work = batch_work(batch, interleave_actions=True, contextual=("user_id",))
    flops = hstu_flops(**SHAPE, layers=config.layers, embedding=embedding, head=head).of(work)
    # The padded reference computes all pairs of a sample, whether a token sees the other or not.
    length, own = 4 + actions, candidates * (2 if actions == 3 else 1)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[0, : length - own] |= sees_history
    mask[:, length - own :] &= torch.eye(length, dtype=torch.bool)[:, length - own :]
    masked = 4 * int((~mask).sum()) * config.layers * config.heads * config.head_dim
    model = make_ranking(config)
    with FlopCounterMode(display=False) as forward:
        loss_sums, _ = model(batch)
    with FlopCounterMode(display=False) as backward:
        loss_sums.sum().backward()
    assert flops.forward + 4 * masked == forward.get_total_flops()
    assert flops.backward + 8 * masked == backward.get_total_flops()


@pytest.mark.parametrize("interleave_actions", [False, True])
@pytest.mark.parametrize("actions", [[3, 5, 0], [4, 7, 0]], ids=["of the history", "of all items"])
def test_the_work_of_a_batch_has_the_tokens_that_costs_count(interleave_actions: bool, actions: list[int]) -> None:
    lengths = {"user_id": [1, 1, 0], "tags": [0, 2, 0], "item_id": [4, 7, 0], "action": actions}
    candidates, contextual = [1, 2, 0], ("user_id", "tags")
    batch = _batch_of(lengths, candidates, candidates)
    work = batch_work(batch, interleave_actions=interleave_actions, contextual=contextual)
    floats = batch.replace(labels=None, float_labels=batch.labels)
    assert batch_work(floats, interleave_actions=interleave_actions, contextual=contextual) == work
    cost = HSTUCost(**SHAPE, layers=1, interleave_actions=interleave_actions, contextual=contextual)
    arrays = {key: np.array(lengths[key]) for key in SIZES}
    tokens = torch.from_numpy(cost.tokens(arrays))
    of_candidates = torch.from_numpy(cost.candidate_tokens(arrays, np.array(candidates)))
    pairs = hstu_pairs(tokens - of_candidates, torch.tensor([1, 3, 0]), of_candidates).sum()
    assert (work.tokens, work.pairs, work.predictions) == (tokens.sum(), pairs, 3)
