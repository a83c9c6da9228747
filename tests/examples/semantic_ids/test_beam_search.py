import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader.codes import CodeTable
from semantic_ids.beam_search import Beams, Catalogue, beam_search
from semantic_ids.config import DecoderConfig
from semantic_ids.model import SemanticIdModel
from tests.examples.semantic_ids.samples import Sample, batch_of, random_samples

SIZES = (3, 4, 2)
ALL_CODES = torch.cartesian_prod(*(torch.arange(size) for size in SIZES)).int().numpy()


def _table(items: list[int]) -> CodeTable:
    """Return a table of these of all codes; -1 is an item without a code."""
    codes = np.array([ALL_CODES[item] if item >= 0 else [-1] * len(SIZES) for item in items], dtype=np.int32)
    return CodeTable(codes=codes, codebook_sizes=SIZES)


def _model(num_users: int = 0) -> SemanticIdModel:
    torch.manual_seed(1)
    contextual = {"user_id": num_users} if num_users else {}
    config = DecoderConfig(codebook_sizes=SIZES, contextual=contextual, hidden=16, heads=2, layers=2, dropout=0)
    model = SemanticIdModel(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)  # so that probabilities differ
    return model


@torch.no_grad()
def _score_all(model: SemanticIdModel, sample: Sample, table: CodeTable, user: int) -> Tensor:
    """Return the log-probability of each item, as training computes it: float64 [items]."""
    as_target = [(*sample[:-1], tuple(codes)) for codes in table.codes.tolist()]
    _, logits = model(batch_of(as_target, SIZES, users=[user] * len(as_target)))
    total = torch.zeros(len(as_target), dtype=torch.float64)
    for level, of_level in enumerate(logits):
        codes = torch.from_numpy(table.codes[:, level]).long()
        total += of_level.log_softmax(dim=-1).gather(1, codes[:, None])[:, 0]
    return total


@settings(max_examples=20)
@given(items=st.sets(st.integers(0, len(ALL_CODES) - 1), min_size=1), seed=st.integers(0, 99))
def test_with_enough_beams_it_equals_scoring_every_item(items: set[int], seed: int) -> None:
    table = _table(sorted(items, key=lambda item: (item * 7) % 24))  # items are not in the order of their codes
    model = _model(num_users=5)
    samples = random_samples(4, SIZES, max_history=4, seed=seed)
    batch = batch_of(samples, SIZES, users=range(4), batch_size=5)
    found = beam_search(model, batch, Catalogue(table), beams=24)
    count = len(items)
    for row, sample in enumerate(samples):
        expected, order = _score_all(model, sample, table, user=row).sort(descending=True)
        assert found.items[row, :count].tolist() == order.tolist()
        assert (found.items[row, count:] == -1).all()
        assert torch.isneginf(found.log_probabilities[row, count:]).all()
        torch.testing.assert_close(found.log_probabilities[row, :count], expected, rtol=1e-10, atol=1e-10)
        assert found.codes[row, :count].tolist() == table.codes[order.numpy()].tolist()


def test_fewer_beams_find_items_that_exist_with_their_own_scores() -> None:
    table = _table([22, 3, -1, 7, 15, 8, 3])
    model = _model()
    sample = random_samples(1, SIZES, max_history=4, seed=3)[0]
    found = beam_search(model, batch_of([sample], SIZES), Catalogue(table), beams=2)
    items = found.items[0].tolist()
    assert len(items) == 2
    assert set(items) < {0, 1, 3, 4, 5}  # not the item without a code, nor the second one of the same codes
    scores = _score_all(model, sample, _table([22, 3, 0, 7, 15, 8, 3]), user=0)
    torch.testing.assert_close(found.log_probabilities[0], scores[items])


@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_an_item_with_several_codes_is_found_once_with_the_probability_of_all_of_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.permutation(ALL_CODES)[:21].reshape(7, 3, len(SIZES))  # of 7 items
    codes[rng.random(7) < 0.5, 2] = -1
    table = CodeTable(codes=codes[:, 0], codebook_sizes=SIZES, alternatives=codes[:, 1:])
    model, samples = _model(num_users=5), random_samples(4, SIZES, max_history=4, seed=seed)
    batch = batch_of(samples, SIZES, users=range(4), batch_size=5)
    found = beam_search(model, batch, Catalogue(table), beams=24)
    for row, sample in enumerate(samples):
        scores = torch.stack(
            [
                _score_all(model, sample, CodeTable(codes=np.maximum(of_item, 0), codebook_sizes=SIZES), user=row)
                .masked_fill(torch.from_numpy(of_item[:, 0] < 0), -torch.inf)
                .logsumexp(dim=0)
                for of_item in codes
            ]
        )
        expected, order = scores.sort(descending=True)
        assert found.items[row].tolist() == order.tolist() + [-1] * (found.items.shape[1] - 7)
        torch.testing.assert_close(found.log_probabilities[row, :7], expected)
        assert found.codes[row, :7].tolist() == table.codes[order.numpy()].tolist()
        assert torch.isneginf(found.log_probabilities[row, 7:]).all()


def test_places_of_targets_are_those_of_their_codes() -> None:
    samples = [((0, 0, 0), (2, 3, 1)), ((1, 1, 1),), ((0, 1, 0), (0, 0, 1)), ((2, 2, 0),)]
    batch = batch_of(samples, SIZES, batch_size=5, history_labels=True)
    found = [["000", "231"], ["111", "001"], ["100", "011"], ["220", "220"], ["000", "231"]]
    codes = torch.tensor([[[int(code) for code in codes] for codes in row] for row in found])
    items = torch.tensor([[5, 6], [7, -1], [1, 2], [-1, -1], [5, 6]])
    beams = Beams(items=items, codes=codes, log_probabilities=torch.zeros(5, 2))
    assert beams.places_of_targets(batch).tolist() == [2, 1, 0, 0]
    only_padding = Beams(items=items[4:], codes=codes[4:], log_probabilities=torch.zeros(1, 2))
    assert only_padding.places_of_targets(batch.index_select([4])).tolist() == []


def test_a_model_of_nan_is_an_error_and_ranks_nothing() -> None:
    model, batch = _model(), batch_of(random_samples(2, SIZES, max_history=1), SIZES)
    torch.nn.init.constant_(next(model.parameters()), torch.nan)
    with pytest.raises(DataError, match="the scores of the model are NaN"):
        beam_search(model, batch, Catalogue(_table([5, 9])), beams=2)


def test_mistakes_are_refused() -> None:
    with pytest.raises(ConfigError, match="none of the 2 items of the table has a code"):
        Catalogue(_table([-1, -1]))
    batch = batch_of(random_samples(2, SIZES, max_history=1), SIZES)
    with pytest.raises(ConfigError, match="beams must be at least 1, got 0"):
        beam_search(_model(), batch, Catalogue(_table([0])), beams=0)
    for sizes in ((3, 4), (3, 4, 5)):
        other = Catalogue(CodeTable(codes=np.zeros((1, len(sizes)), dtype=np.int32), codebook_sizes=sizes))
        with pytest.raises(ConfigError, match=r"catalogue has codebooks of \[3, 4.*, the model of \[3, 4, 2\]; create"):
            beam_search(_model(), batch, other, beams=2)
