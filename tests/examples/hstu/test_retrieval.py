from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from hstu.config import tables
from hstu.retrieval import HSTURetrieval, UniformNegatives, without_values
from tests.dataloader.batch_helpers import rows_of
from tests.examples.hstu.exactness import gradients_of
from tests.examples.hstu.samples import CONFIG, SIZES, Sample, Tables, make_batch, make_retrieval, random_samples

SAMPLE = Sample(user_id=[3], tags=[1], item_id=[4, 5, 6, 7], action=[1, 2, 3, 4])


def _items(model: HSTURetrieval) -> Tensor:
    weight: Tensor = model.get_parameter("embeddings.tables.item_id.weight")
    return weight.detach()


def _queries(model: HSTURetrieval, batch: SequenceBatch) -> list[Tensor]:
    """Return what each sample's tokens predict, computed from the encoder's output: [tokens, embedding_dim] each."""
    seen: list[Tensor] = []
    hook = model.dense.encoder.register_forward_hook(lambda _module, _args, output: seen.append(output))
    model(batch.replace(labels=None))
    hook.remove()
    lengths = batch.features.lengths().view(4, -1).sum(0)
    return list(torch.split(model.dense.lower_width(seen[0]).detach(), lengths.tolist()))


def test_each_next_item_is_predicted_from_the_action_before_it_among_the_negatives() -> None:
    model = make_retrieval(temperature=0.1)
    batch = make_batch([SAMPLE, Sample(user_id=[1], item_id=[2], action=[0]), Sample(tags=[1])], rows=4)
    loss_sums, log_probabilities = model(batch)
    negatives = rows_of(model.negatives(batch), "negative_id")[0]
    items, queries = _items(model), _queries(model, batch)[0]
    expected = []
    for index, target in enumerate(SAMPLE.item_id[1:]):
        query = queries[2 + 2 * index + 1]  # after 2 contextual tokens, that of the item's action
        others = [item for item in negatives if item != target]
        scores = cosine_similarity(query[None], items[[target, *others]]) / 0.1
        expected.append(scores.log_softmax(0)[0])
    assert len(set(negatives) & set(SAMPLE.item_id[1:])) > 0  # accidental hits
    assert batch.loss_tokens == 3
    torch.testing.assert_close(log_probabilities.squeeze(1), torch.stack(expected), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss_sums, -torch.stack(expected).sum()[None], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("interleave", "items", "actions", "expected"),
    [
        (True, [4, 5, 6, 9], [1, 2, 0, 0], [True, True, False]),
        (False, [4, 8, 6, 7], [0, 0, 0, 0], [False, False, False]),
        (False, [4, 5, 9, 7], [1, 2, 3, 4], [True, False, False]),
    ],
)
def test_an_item_is_predicted_without_its_future_and_without_interleaving_from_the_item_before_it(
    interleave: bool, items: list[int], actions: list[int], expected: list[bool]
) -> None:
    model = make_retrieval(replace(CONFIG, interleave_actions=interleave))
    before, after = (
        model(make_batch([sample]))[1].squeeze(1) for sample in (SAMPLE, replace(SAMPLE, item_id=items, action=actions))
    )
    assert torch.isclose(before, after, rtol=1e-12, atol=0).tolist() == expected


@pytest.mark.parametrize("chunk", [7, 1000])
def test_places_are_those_among_all_items(chunk: int) -> None:
    model = make_retrieval().eval()
    samples = random_samples(10, predict="next")
    batch = make_batch(samples, rows=12)
    expected = []
    for sample, queries in zip(samples, _queries(model, batch), strict=False):
        if len(sample.item_id) >= 2:
            scores = cosine_similarity(queries[-3][None], _items(model))  # the last two are the target and its action
            expected.append(1 + (scores > scores[sample.item_id[-1]]).sum().item())
    assert 0 < len(expected) < 10
    assert model.places_of_targets(batch, chunk=chunk).tolist() == expected


def test_scores_are_compared_in_float32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_retrieval().float().eval()
    batch = make_batch(random_samples(300, predict="next"))

    def random_queries(tokens: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return normalize(torch.randn(len(tokens), CONFIG.embedding_dim, generator=generator))

    monkeypatch.setattr(model.dense, "query", random_queries)
    places = model.places_of_targets(batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.places_of_targets(batch).tolist() == places.tolist()


def test_a_candidate_is_ranked_by_the_history_alone_and_has_no_place_without_one() -> None:
    model = make_retrieval().eval()
    (place,) = model.places_of_targets(make_batch([SAMPLE])).tolist()
    as_candidate = replace(SAMPLE, action=[1, 2, 3], num_candidates=1, labels=[4])
    among_others = [
        replace(as_candidate, item_id=[4, 5, 6, other, 7], num_candidates=2, labels=[4, 4])
        for other in range(SIZES["item_id"])
    ]
    without = [Sample(user_id=user, item_id=[4, 5], num_candidates=2, labels=[1, 1]) for user in ([], [3])]
    batch = make_batch([as_candidate, *without, *among_others])
    assert model.places_of_targets(batch).tolist() == [place] * (1 + len(among_others))


def test_no_sample_has_no_place_and_zero_gradients() -> None:
    model = make_retrieval()
    batch = make_batch([], rows=2).replace(labels=None)
    assert model.places_of_targets(batch).tolist() == []
    loss_sums, log_probabilities = model(batch)
    assert log_probabilities.shape == (0, 1)
    loss_sums.sum().backward()
    assert not any(gradient.any() for gradient in gradients_of(model))
    torch.nn.init.constant_(model.dense.lower_width.weight, torch.nan)  # as of a model that has diverged
    assert model.places_of_targets(make_batch([SAMPLE])).tolist() == [SIZES["item_id"]]


def test_negatives_are_those_of_the_step_whatever_samples_a_rank_has() -> None:
    draw = UniformNegatives(1000, 50, seed=1)
    first = make_batch(random_samples(3), rows=4).replace(epoch=2, position=48, step=5)
    other = make_batch(random_samples(1, seed=1)).replace(epoch=2, position=48, step=0)  # resumed, on another rank
    negatives = rows_of(draw(first), "negative_id")
    assert negatives[1:] == [[], [], []]
    assert len(negatives[0]) == 50
    assert 0 <= min(negatives[0]) < 100
    assert 900 <= max(negatives[0]) < 1000
    assert rows_of(draw(other), "negative_id") == negatives[:1]
    others = [draw(first.replace(epoch=3)), draw(first.replace(position=49)), UniformNegatives(1000, 50, seed=2)(first)]
    assert all(rows_of(features, "negative_id") != negatives for features in others)


def test_the_other_features_stay_as_they_are() -> None:
    batch = make_batch([Sample(user_id=[1], item_id=[4, 5], action=[6, 7]), Sample(tags=[3])])
    features = UniformNegatives(10, 3, seed=0)(batch)
    assert features.keys() == ["user_id", "tags", "item_id", "action", "negative_id"]
    for key in ("user_id", "tags", "item_id", "action"):
        assert rows_of(features, key) == rows_of(batch.features, key)
    assert features.length_per_key() == [1, 1, 2, 2, 3]
    empty = without_values(batch.features)
    assert empty.keys() == batch.features.keys()
    assert [rows_of(empty, key) for key in ("user_id", "tags", "item_id", "action")] == [[[], []]] * 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: UniformNegatives(0, 1, seed=0), "num_items must be at least 1, got 0"),
        (lambda: UniformNegatives(1, 0, seed=0), "num_negatives must be at least 1, got 0"),
        (lambda: make_retrieval(temperature=0), "temperature must be positive, got 0"),
        (lambda: make_retrieval()(make_batch(random_samples(1))), "has labels; set max_num_candidates=0 and num_"),
        (
            lambda: HSTURetrieval(Tables(tables(SIZES, CONFIG)), CONFIG, num_items=30)(make_batch([SAMPLE])),
            "lack the feature 'negative_id'.*for retrieval, with retrieval=True",
        ),
    ],
)
def test_mistakes_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
