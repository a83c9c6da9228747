from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenrank.core.errors import ConfigError
from evenrank.dataloader import LoaderConfig, SemanticIdBatch, build_loader, random_codes
from evenrank.dataloader.balance import BalanceConfig, Balancer
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.training import scale_loss
from semantic_ids.config import DecoderConfig
from semantic_ids.model import SemanticIdModel
from tests.examples.hstu.exactness import gradients_of
from tests.examples.semantic_ids.samples import batch_of, random_samples
from tests.ranks import RankPool

SIZES = (4, 5, 6)


def _model(sizes: tuple[int, ...] = SIZES, num_users: int = 0) -> SemanticIdModel:
    torch.manual_seed(0)
    contextual = {"user_id": num_users} if num_users else {}
    config = DecoderConfig(codebook_sizes=sizes, contextual=contextual, hidden=16, heads=2, layers=2, dropout=0)
    return SemanticIdModel(config).double()


def _changed(batch: SemanticIdBatch, key: str, index: int) -> SemanticIdBatch:
    """Return the batch with another token of the same level at a place of a feature."""
    values = batch.features.values().clone()
    begin = batch.features.offset_per_key()[batch.features.keys().index(key)]
    level = index % len(SIZES)
    first = sum(SIZES[:level])
    values[begin + index] = first + (values[begin + index] - first + 1) % SIZES[level]
    lengths = batch.features.lengths().view(len(batch.features.keys()), -1).numpy()
    return batch.replace(features=keyed_jagged_tensor(batch.features.keys(), values, lengths))


def _logits_of_codes(model: SemanticIdModel, batch: SemanticIdBatch) -> Tensor:
    """Return the logits of each code: [codes, largest codebook], -1 beyond a level's codebook."""
    with torch.no_grad():
        logits = model(batch)[1]
    padded = [nn.functional.pad(of_level, (0, max(SIZES) - of_level.shape[1]), value=-1) for of_level in logits]
    return torch.stack(padded, dim=1).flatten(0, 1)


@pytest.mark.parametrize("key", ["semantic_id", "candidate_id"])
def test_a_token_changes_exactly_the_predictions_after_it(key: str) -> None:
    sample = random_samples(1, SIZES, max_history=0)[0] * 5  # a history of 4 events
    batch = batch_of([sample], SIZES, history_labels=True)
    model = _model()
    before = _logits_of_codes(model, batch)
    for index in range(len(batch.features[key].values())):
        is_changed = (before != _logits_of_codes(model, _changed(batch, key, index))).any(dim=-1).tolist()
        # Predictions are those of the codes of events 1 to 4, of which event 4 is the target.
        code = index - 3 if key == "semantic_id" else index + 9
        assert is_changed == [prediction > code for prediction in range(12)], (key, index)


def test_the_loss_is_the_cross_entropy_of_each_level() -> None:
    samples = random_samples(5, SIZES, max_history=4)
    batch = batch_of(samples, SIZES, history_labels=True)
    loss_sums, logits = _model()(batch)
    labels = batch.labels["label"].values().tolist()
    for level, of_level in enumerate(logits):
        codes = labels[level::3]
        assert of_level.shape == (len(codes), SIZES[level])
        log_probabilities = of_level.log_softmax(dim=-1)
        expected = -sum(log_probabilities[event, code] for event, code in enumerate(codes))
        torch.testing.assert_close(loss_sums[level], expected)


@settings(max_examples=20)
@given(order=st.permutations(range(6)), padding=st.integers(0, 3))
def test_neither_order_nor_padding_changes_a_sample(order: list[int], padding: int) -> None:
    samples = random_samples(6, SIZES, max_history=5)
    model = _model(num_users=6)
    with torch.no_grad():
        loss_sums, logits = model(batch_of(samples, SIZES, users=range(6)))
        permuted = batch_of([samples[row] for row in order], SIZES, users=order, batch_size=6 + padding)
        permuted_sums, permuted_logits = model(permuted)
    torch.testing.assert_close(permuted_sums, loss_sums, rtol=1e-12, atol=1e-12)
    for of_level, permuted_of_level in zip(logits, permuted_logits, strict=True):
        torch.testing.assert_close(permuted_of_level, of_level[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_batch_without_samples_has_a_zero_gradient_for_every_parameter(padding: int) -> None:
    model = _model(num_users=4)
    batch = batch_of(random_samples(2, SIZES, max_history=3), SIZES, users=[1, 2], batch_size=2 + padding)
    empty = batch.index_select(range(2, 2 + padding))
    loss_sums, logits = model(empty)
    loss_sums.sum().backward()
    assert loss_sums.tolist() == [0, 0, 0]
    assert [list(of_level.shape) for of_level in logits] == [[0, 4], [0, 5], [0, 6]]
    assert not any(gradient.any() for gradient in gradients_of(model))


def test_the_cost_counts_contextual_tokens_the_history_and_the_candidate() -> None:
    cost = DecoderConfig(codebook_sizes=(4, 5), contextual={"user_id": 9}, hidden=8, heads=2, layers=3).cost()
    lengths = {"user_id": np.array([1]), "semantic_id": np.array([6]), "candidate_id": np.array([2])}
    no_candidates = np.zeros(1, dtype=np.int64)
    assert cost(lengths, no_candidates) == cost.of_tokens(np.array([9]), no_candidates)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebook_sizes": (4, 0)}, r"codebook_sizes must be numbers of at least 1, got \[4, 0\]"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"hidden": 20, "heads": 4}, r"hidden must be a multiple of 2 \* heads, got hidden=20 and heads=4"),
        ({"contextual": ("user_id",)}, r"the size of each feature's vocabulary, got \('user_id',\); pass a mapping"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig(**{"codebook_sizes": (4, 4), **changes})


@pytest.mark.parametrize("sizes", [(4, 5), (4, 5, 6, 2, 2, 2)])
def test_batches_of_other_codes_are_refused(sizes: tuple[int, ...]) -> None:
    batch = batch_of(random_samples(6, sizes, max_history=0), sizes)  # a multiple of 3 labels
    with pytest.raises(ConfigError, match=f"has {len(sizes)} codes per item, codebook_sizes 3 levels; create the"):
        _model()(batch)


TABLE = random_codes(501, levels=3, codebook_size=8)


def _config(batch_size: int) -> LoaderConfig:
    options: dict[str, Any] = {"max_history_length": 20, "candidate_feature": True, "history_labels": True}
    return LoaderConfig(codes=TABLE, batch_size=batch_size, **options)


def _train(rank: int, world_size: int, path: Path) -> list[list[Tensor]]:
    model = _model(TABLE.codebook_sizes)
    parallel = DistributedDataParallel(model)
    loader = build_loader(path, _config(6), rank=rank, world_size=world_size)
    gradients = []
    with Balancer(loader, BalanceConfig(cost=model.config.cost())) as balancer:
        for batch in balancer:
            loss_sums, _ = parallel(batch)
            scale_loss(loss_sums.sum(), batch).backward()
            gradients.append(gradients_of(model))
    return gradients


def test_gradients_of_four_ranks_equal_those_of_one_process(ranks: RankPool, small_dataset: Path) -> None:
    model = _model(TABLE.codebook_sizes)
    expected = []
    for batch in build_loader(small_dataset, _config(24), rank=0, world_size=1):
        (model(batch)[0].sum() / batch.loss_tokens).backward()
        expected.append(gradients_of(model))
    for gradients in ranks.run(4, _train, small_dataset):
        assert len(gradients) == len(expected) > 2
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_a_step_on_a_gpu_does_not_synchronize() -> None:
    model = _model(num_users=6).float().cuda()
    batch = batch_of(random_samples(6, SIZES, max_history=9), SIZES, users=range(6), history_labels=True, batch_size=8)
    on_gpu = batch.to("cuda")
    for mode in ("default", "error"):  # the first step may compile or allocate
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss_sums, _ = model(on_gpu)
            loss_sums.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected, _ = _model(num_users=6)(batch)
    torch.testing.assert_close(loss_sums.cpu().double(), expected, rtol=1e-4, atol=1e-4)
