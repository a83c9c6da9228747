"""Batches whose targets keep their first codes alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, SemanticIdBatch, pad_batch
from evenrank.dataloader.batches.padding import empty_batch
from evenrank.dataloader.batches.schema import check_contents, schema_of
from evenrank.dataloader.random_batches import RandomBatches, RandomData, random_codes
from evenrank.datasets.distributions import Uniform
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.batch_helpers import rows_of

CODES = random_codes(50, levels=3, codebook_size=9)
FLAGS = ("history_labels", "candidate_feature", "label_offsets")


def _batches(num_batches: int = 1, num_real: int = 5, **options: Any) -> list[SemanticIdBatch]:
    config = LoaderConfig(batch_size=6, codes=CODES, max_history_length=7, user_id=True, **options)
    lengths, real = Uniform(low=1, high=9), Uniform(low=num_real, high=num_real)
    data = RandomData(lengths=lengths, items=Uniform(low=0, high=49), num_real=real)
    return list(RandomBatches(config, data, num_batches=num_batches))


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(0, 6), st.fixed_dictionaries(dict.fromkeys(FLAGS, st.booleans())))
def test_targets_keep_their_first_codes_and_all_else_stays(num_levels: int, num_real: int, options: Any) -> None:
    (batch,) = _batches(num_real=num_real, **options)
    padded = pad_batch(batch.slice(0, num_real), 6)
    # At once, in steps, after rows were selected or padded.
    for whole in (batch, batch.retain_candidate_hierarchies(max(num_levels, 2)), padded, batch.index_select(range(6))):
        kept: Any = whole.retain_candidate_hierarchies(num_levels)
        check_contents(kept, schema_of(kept))
        cut = 3 - num_levels
        for key in batch.features.keys():  # noqa: SIM118
            end = num_levels if key == "candidate_id" else None
            assert rows_of(kept.features, key) == [row[:end] for row in rows_of(batch.features, key)]
        labels = [row[: len(row) - cut] for row in rows_of(batch.labels, "label")]
        assert rows_of(kept.labels, "label") == labels
        assert (kept.loss_tokens, kept.candidate_levels) == (sum(map(len, labels)), num_levels)
        assert kept.max_lengths["label"] == max(map(len, labels))
        assert kept.length_limits["label"] == (7 if options["history_labels"] else 1) * 3 - cut
        if options["candidate_feature"]:
            assert kept.length_limits["candidate_id"] == num_levels
            assert kept.max_lengths["candidate_id"] == num_levels * (num_real > 0)
        # Caches on the host, with which no later call synchronizes, are right too.
        for jagged in (kept.features, kept.labels):
            assert jagged.offset_per_key()[-1] == len(jagged.values()) == jagged.lengths().sum()
    assert (batch.candidate_levels, batch.loss_tokens) == (3, len(batch.labels.values()))  # it has not changed


def test_the_schema_has_the_levels_and_wrong_numbers_are_refused() -> None:
    (batch,) = _batches()
    once = batch.retain_candidate_hierarchies(1)
    assert once.retain_candidate_hierarchies(1) is once
    for of_batch, number, levels in ((batch, 0, 3), (batch, 4, 3), (once, 2, 1)):
        message = f"num_levels must be between 1 and candidate_levels = {levels}, got {number}"
        with pytest.raises(ConfigError, match=message):
            of_batch.retain_candidate_hierarchies(number)
    counted = batch.replace(world_loss_tokens=99)
    assert counted.retain_candidate_hierarchies(3).world_loss_tokens == 99
    assert counted.retain_candidate_hierarchies(2).world_loss_tokens is None  # no rank knows the others' samples
    schema, cut = schema_of(batch), schema_of(batch.retain_candidate_hierarchies(2))
    assert cut.differences(schema) == ["length limit of label: 2 and 3", "candidate_levels: 2 and 3"]
    empty: Any = empty_batch(schema)
    assert (empty.candidate_levels, schema_of(empty)) == (3, schema)


@pytest.mark.gpu
def test_on_a_gpu_nothing_synchronizes() -> None:
    (batch,) = _batches(history_labels=True, candidate_feature=True)
    moved = batch.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = moved.retain_candidate_hierarchies(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bits_of(kept) == bits_of(batch.retain_candidate_hierarchies(1))
