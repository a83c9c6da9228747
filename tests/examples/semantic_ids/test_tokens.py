from pathlib import Path
from typing import Any

import pytest
import torch

from evenrank.core.errors import ConfigError
from evenrank.dataloader import Loader, LoaderConfig, SemanticIdBatch, build_loader, random_codes
from semantic_ids.tokens import BOS, lay_out, predicting_tokens
from tests.examples.semantic_ids.samples import batch_of

SIZES = (4, 5)
NAMES = ("user_id", "semantic_id", BOS, "candidate_id")
SAMPLES = [((0, 1), (2, 3), (1, 4)), ((3, 0),), ((1, 1), (2, 2))]


@pytest.mark.parametrize("history_labels", [False, True])
def test_each_label_is_predicted_at_the_token_before_it(history_labels: bool) -> None:
    batch = batch_of(SAMPLES, SIZES, batch_size=4, users=[7, 8, 9], history_labels=history_labels)
    layout = lay_out(batch, NAMES)
    values = {name: batch.features[name].values()[:, None] for name in NAMES if name != BOS}
    tokens = layout.arrange({**values, BOS: torch.full((batch.batch_size, 1), -1)}).flatten()
    rows = [part.tolist() for part in tokens.split(layout.sequences.lengths.tolist())]
    assert rows == [[7, 0, 5, 2, 7, -1, 1, 8], [8, -1, 3, 4], [9, 1, 5, -1, 2, 6], [-1]]
    expected = [[5, 6], [9, 10], [15, 16]]  # BOS of each sample and the token after it
    if history_labels:
        expected[0] = [2, 3, 5, 6]  # the last code of the first event, and the first of the second
    assert predicting_tokens(batch, layout, 2).tolist() == [place for row in expected for place in row]


@pytest.mark.parametrize("history_labels", [False, True])
def test_labels_of_a_loader_follow_the_tokens_that_predict_them(small_dataset: Path, history_labels: bool) -> None:
    table = random_codes(501, levels=3, codebook_size=8)
    options: dict[str, Any] = {"max_history_length": 9, "candidate_feature": True, "history_labels": history_labels}
    config = LoaderConfig(codes=table, batch_size=16, **options)
    names = ("semantic_id", BOS, "candidate_id")
    checked = 0
    loader: Loader[SemanticIdBatch] = build_loader(small_dataset, config, rank=0, world_size=1)
    for batch in loader:
        layout = lay_out(batch, names)
        values = {name: batch.features[name].values() for name in names if name != BOS}
        tokens = layout.arrange({**values, BOS: torch.full((batch.batch_size,), -1)})
        at = predicting_tokens(batch, layout, 3)
        level = torch.arange(len(at)) % 3
        is_history = tokens.eq(-1).cumsum(0).gather(0, at) == layout.sequences.rows[at]  # BOS of its row is to come
        assert torch.equal(tokens[at + 1], batch.labels["label"].values() + 8 * level)
        assert torch.equal(layout.sequences.rows[at], layout.sequences.rows[at + 1])
        assert bool(is_history.any()) == history_labels
        assert layout.sequences.max_length >= layout.sequences.lengths.max()
        checked += len(at)
    assert checked > 300


def test_batches_without_what_the_model_needs_are_refused() -> None:
    batch = batch_of(SAMPLES, SIZES)
    with pytest.raises(ConfigError, match="needs the feature 'user_id'; batches have semantic_id, candidate_id;"):
        lay_out(batch, NAMES)
    with pytest.raises(ConfigError, match="has no max_lengths; iterate over a loader of evenrank or a Balancer"):
        lay_out(batch.replace(max_lengths=None), NAMES)
