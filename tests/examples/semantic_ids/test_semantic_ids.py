"""Tokens, attention, losses and beam search of the model of semantic ids, beside plain ways to compute them."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from evenrank.core.errors import DataError
from evenrank.dataloader import CodeTable, SemanticIdBatch
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from hstu.model import arrange
from semantic_ids import Catalogue, DecoderConfig, SemanticIdModel, beam_search
from semantic_ids.beam_search import Beams
from semantic_ids.model import BOS, lay_out, predicting_tokens
from tests.examples.hstu.samples import gradients_of, jagged, run_quietly

Codes = tuple[int, ...]
Sample = tuple[Codes, ...]  # of each event; the last event is the target
SIZES = (3, 4, 2)
ALL_CODES = torch.cartesian_prod(*(torch.arange(size) for size in SIZES)).int().numpy()


def batch_of(
    samples: Sequence[Sample],
    *,
    sizes: Sequence[int] = SIZES,
    padding: int = 0,
    users: Sequence[int] = (),
    first: int = 0,
) -> SemanticIdBatch:
    """Return what a loader makes of these samples, with `candidate_feature` and, if there are users, `user_id`.

    Labels are those of the target or, if `first` is 1, of all events but the first.
    """
    offsets, rows = list(accumulate(sizes, initial=0)), [list[int]()] * padding

    def tokens(events: Sequence[Codes]) -> list[int]:
        return [code + offset for codes in events for code, offset in zip(codes, offsets, strict=False)]

    features = {"user_id": [[user] for user in users] + rows} if users else {}
    features["semantic_id"] = [tokens(events[:-1]) for events in samples] + rows
    features["candidate_id"] = [tokens(events[-1:]) for events in samples] + rows
    labels = [list(chain(*events[min(first or 99, len(events) - 1) :])) for events in samples] + rows
    (of_features, limits), (of_labels, label_limits) = jagged(features), jagged({"label": labels})
    return SemanticIdBatch(
        batch_size=len(labels),
        num_real=len(samples),
        loss_tokens=len(of_labels.values()),
        max_lengths=limits | label_limits,
        sample_ids=torch.arange(len(labels)),
        features=of_features,
        labels=of_labels,
    )


def random_samples(num_samples: int, *, max_history: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    lengths = (rng.integers(max_history + 1) + 1 for _ in range(num_samples))
    return [tuple(tuple(rng.integers(SIZES).tolist()) for _ in range(length)) for length in lengths]


def make_model(sizes: tuple[int, ...] = SIZES, num_users: int = 0) -> SemanticIdModel:
    torch.manual_seed(1)
    contextual = {"user_id": num_users} if num_users else {}
    config = DecoderConfig(codebook_sizes=sizes, contextual=contextual, hidden=16, heads=2, layers=2, dropout=0)
    model = SemanticIdModel(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)  # so that probabilities differ
    return model


# The tokens of the first sample before those that are labels: BOS and the token after it; with labels of the history,
# also the last code of the first event, and the first of the second.
@pytest.mark.parametrize(("first", "of_first"), [(0, [5, 6]), (1, [2, 3, 5, 6])])
def test_each_label_is_predicted_at_the_token_before_it(first: int, of_first: list[int]) -> None:
    samples = [((0, 1), (2, 3), (1, 4)), ((3, 0),), ((1, 1), (2, 2))]
    batch = batch_of(samples, sizes=(4, 5), padding=1, users=[7, 8, 9], first=first)
    sequences, places = lay_out(batch, ("user_id", "semantic_id", BOS, "candidate_id"))
    values = {name: batch.features[name].values()[:, None] for name in places if name != BOS}
    tokens = arrange({**values, BOS: torch.full((batch.batch_size, 1), -1)}, places).flatten()
    rows = [part.tolist() for part in tokens.split(sequences.lengths.tolist())]
    assert rows == [[7, 0, 5, 2, 7, -1, 1, 8], [8, -1, 3, 4], [9, 1, 5, -1, 2, 6], [-1]]
    assert predicting_tokens(batch, places[BOS], 2).tolist() == [*of_first, 9, 10, 15, 16]


@torch.no_grad()
def _logits_of_codes(batch: SemanticIdBatch) -> Tensor:
    """Return the logits of each code: [codes, largest codebook], -1 beyond a level's codebook."""
    logits = make_model()(batch)[1]
    padded = [nn.functional.pad(of_level, (0, max(SIZES) - of_level.shape[1]), value=-1) for of_level in logits]
    return torch.stack(padded, dim=1).flatten(0, 1)


@pytest.mark.parametrize("key", ["semantic_id", "candidate_id"])
def test_a_token_changes_exactly_the_predictions_after_it(key: str) -> None:
    batch = batch_of([random_samples(1, max_history=0)[0] * 5], first=1)  # a history of 4 events
    before = _logits_of_codes(batch)
    begin = batch.features.offset_per_key()[batch.features.keys().index(key)]
    lengths = batch.features.lengths().view(2, -1).numpy()
    for index in range(len(batch.features[key].values())):
        values, offset = batch.features.values().clone(), sum(SIZES[: index % 3])  # another token of the same level
        values[begin + index] = offset + (values[begin + index] - offset + 1) % SIZES[index % 3]
        changed = batch.replace(features=keyed_jagged_tensor(batch.features.keys(), values, lengths))
        is_changed = (before != _logits_of_codes(changed)).any(dim=-1).tolist()
        # Predictions are those of the codes of events 1 to 4, of which event 4 is the target.
        code = index - 3 if key == "semantic_id" else index + 9
        assert is_changed == [prediction > code for prediction in range(12)], (key, index)


@settings(max_examples=20)
@given(order=st.permutations(range(6)), padding=st.integers(0, 3))
def test_the_loss_is_the_cross_entropy_and_neither_order_nor_padding_changes_it(order: list[int], padding: int) -> None:
    samples, model = random_samples(6, max_history=5), make_model(num_users=6)
    batch = batch_of(samples, users=range(6))
    permuted = batch_of([samples[row] for row in order], users=order, padding=padding)
    loss_sums, logits = model(batch)
    permuted_sums, permuted_logits = model(permuted)
    torch.testing.assert_close(permuted_sums, loss_sums, rtol=1e-12, atol=1e-12)
    for level, (of_level, permuted_of_level) in enumerate(zip(logits, permuted_logits, strict=True)):
        torch.testing.assert_close(permuted_of_level, of_level[order], rtol=1e-12, atol=1e-12)
        codes = batch.labels["label"].values()[level::3]
        expected = -of_level.log_softmax(dim=-1).gather(1, codes[:, None]).sum()
        torch.testing.assert_close(loss_sums[level], expected)
    # Without samples, every parameter has a gradient of zero.
    loss_sums, logits = model(batch_of(samples, users=order, padding=3).index_select([6, 7, 8]))
    loss_sums.sum().backward()
    assert [list(of_level.shape) for of_level in logits] == [[0, 3], [0, 4], [0, 2]]
    assert not any(gradient.any() for gradient in gradients_of(model))


@torch.no_grad()
def _score_all(model: SemanticIdModel, sample: Sample, codes: Any, user: int) -> Tensor:
    """Return the log-probability of each tuple of codes, as training computes it: float64 [items]."""
    as_target = [(*sample[:-1], tuple(of_item)) for of_item in codes.tolist()]
    _, logits = model(batch_of(as_target, users=[user] * len(as_target)))
    of_codes = torch.from_numpy(codes).long().split(1, dim=1)
    parts = (level.log_softmax(dim=-1).gather(1, code) for level, code in zip(logits, of_codes, strict=True))
    return torch.cat([*parts], dim=1).sum(dim=1)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 99), num_items=st.integers(1, 7), num_codes=st.integers(1, 3), beams=st.sampled_from([2, 24])
)
def test_a_search_finds_the_most_probable_items_that_exist_once_each(
    seed: int, num_items: int, num_codes: int, beams: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.permutation(ALL_CODES)[: num_items * num_codes].reshape(num_items, num_codes, 3)
    codes[rng.random(num_items) < 0.5, 1:] = -1  # of items with fewer codes
    alternatives = codes[:, 1:] if num_codes > 1 else None
    table = CodeTable(codes=codes[:, 0], codebook_sizes=SIZES, alternatives=alternatives)
    model, samples = make_model(num_users=5), random_samples(4, max_history=4, seed=seed)
    found = beam_search(model, batch_of(samples, users=range(4), padding=1), Catalogue(table), beams=beams)
    for row, sample in enumerate(samples):
        scores = torch.full((num_items, num_codes), -torch.inf, dtype=torch.float64)
        for number in range(num_codes):
            known = codes[:, number, 0] >= 0
            scores[known, number] = _score_all(model, sample, np.maximum(codes[:, number], 0), user=row)[known]
        expected, order = scores.logsumexp(dim=1).sort(descending=True)
        items = [item for item in found.items[row].tolist() if item >= 0]
        assert len(set(items)) == len(items) > 0
        assert torch.isneginf(found.log_probabilities[row, len(items) :]).all()
        assert found.codes[row, : len(items)].tolist() == table.codes[items].tolist()
        if num_codes == 1:
            torch.testing.assert_close(found.log_probabilities[row, : len(items)], scores[items, 0])
        if beams == 24:  # as many as there are tuples of codes
            assert items == order.tolist()
            torch.testing.assert_close(found.log_probabilities[row, : len(items)], expected, rtol=1e-10, atol=1e-10)


def test_items_with_the_codes_of_others_or_none_are_not_found_and_nan_is_an_error() -> None:
    codes = np.where(np.arange(4)[:, None] == 2, -1, ALL_CODES[[22, 3, 0, 3]]).astype(np.int32)
    model, batch = make_model(), batch_of(random_samples(1, max_history=4, seed=3))
    catalogue = Catalogue(CodeTable(codes=codes, codebook_sizes=SIZES))
    assert set(beam_search(model, batch, catalogue, beams=9).items[0].tolist()) - {-1} == {0, 1}
    nn.init.constant_(next(model.parameters()), torch.nan)
    with pytest.raises(DataError, match="the scores of the model are NaN"):
        beam_search(model, batch, catalogue, beams=2)


def test_places_of_targets_are_those_of_their_codes() -> None:
    samples = [((0, 0, 0), (2, 3, 1)), ((1, 1, 1),), ((0, 1, 0), (0, 0, 1)), ((2, 2, 0),)]
    found = [["000", "231"], ["111", "001"], ["100", "011"], ["220", "220"], ["000", "231"]]
    codes = torch.tensor([[[int(code) for code in codes] for codes in row] for row in found])
    items = torch.tensor([[5, 6], [7, -1], [1, 2], [-1, -1], [5, 6]])
    beams = Beams(items=items, codes=codes, log_probabilities=torch.zeros(5, 2))
    assert beams.places_of_targets(batch_of(samples, padding=1, first=1)).tolist() == [2, 1, 0, 0]


@pytest.mark.gpu
def test_jagged_attention_on_a_gpu_has_the_gradients_of_the_cpu_and_a_step_waits_for_nothing() -> None:
    model, batch = make_model(num_users=6), batch_of(random_samples(6, max_history=9), users=range(6), padding=2)
    model(batch)[0].sum().backward()
    expected = gradients_of(model)
    model.float().cuda()
    on_gpu = batch.to("cuda")
    run_quietly(lambda: model(on_gpu)[0].sum().backward())  # twice
    for mine, best in zip(gradients_of(model), expected, strict=True):
        assert (mine.cpu().double() / 2 - best).norm() <= 1e-4 * best.norm()
