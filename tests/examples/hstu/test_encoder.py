from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from hstu.config import ATTENTIONS, HSTUConfig, feature_of, tables
from hstu.encoder import PositionEmbedding, lay_out, values_of
from tests.examples.hstu.samples import CONFIG, SIZES, Sample, make_batch, make_ranking, make_sequences, random_samples

KEYS = ("user_id", "tags", "item_id", "action")
FIRST = {"user_id": 100, "tags": 200, "item_id": 300, "action": 400}  # what the tokens of a feature begin with


def _arranged(batch: SequenceBatch, *, interleave_actions: bool = True) -> list[list[int]]:
    """Return the tokens of each row, where the value v of a feature is FIRST[feature] + v."""
    config = replace(CONFIG, interleave_actions=interleave_actions)
    layout = lay_out(batch, config, predicts_history=torch.zeros(batch.batch_size, dtype=torch.bool))
    embeddings = {
        key: JaggedTensor(batch.features[key].values()[:, None] + FIRST[key], lengths=batch.features[key].lengths())
        for key in KEYS
    }
    tokens = layout.arrange(values_of(embeddings)).squeeze(1)
    return [row.tolist() for row in torch.split(tokens, layout.sequences.lengths.tolist())]


def _one_by_one(sample: Sample, interleave_actions: bool) -> list[int]:
    tokens = [100 + value for value in sample.user_id] + [200 + value for value in sample.tags]
    for index, item in enumerate(sample.item_id):
        tokens.append(300 + item)
        if interleave_actions and index < len(sample.action):
            tokens.append(400 + sample.action[index])
    return tokens


def test_sequences_say_which_tokens_are_contextual_or_candidates() -> None:
    batch = make_batch(
        [
            Sample(user_id=[1], tags=[3, 4], item_id=[5, 6, 7], action=[0, 1], num_candidates=1),
            Sample(user_id=[2], item_id=[8]),
            Sample(user_id=[3], tags=[5], item_id=[9, 10], action=[2, 3], num_candidates=1),
        ],
        rows=4,
    )
    sequences = lay_out(batch, CONFIG, predicts_history=torch.tensor([False, False, True, False])).sequences
    assert sequences.offsets.tolist() == [0, 8, 10, 16, 16]
    assert sequences.num_contextual.tolist() == [3, 1, 0, 0]
    assert sequences.num_candidates.tolist() == [1, 0, 2, 0]
    assert sequences.max_length == 1 + 2 + 3 + 2  # the longest of each feature


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 6),
    padding=st.integers(0, 2),
    predict=st.sampled_from(["candidates", "candidates-with-actions", "history"]),
    interleave_actions=st.booleans(),
)
def test_tokens_are_those_of_loops(seed: int, count: int, padding: int, predict: str, interleave_actions: bool) -> None:
    samples = random_samples(count, seed=seed, predict=predict)
    batch = make_batch(samples, rows=count + padding + 1)
    expected = [_one_by_one(sample, interleave_actions) for sample in samples] + [[]] * (padding + 1)
    assert _arranged(batch, interleave_actions=interleave_actions) == expected

    config = replace(CONFIG, interleave_actions=interleave_actions)
    sequences = lay_out(batch, config, predicts_history=torch.zeros(batch.batch_size, dtype=torch.bool)).sequences
    lengths = {key: batch.features[key].lengths().numpy().astype(np.int64) for key in KEYS}
    assert sequences.lengths.tolist() == config.cost().tokens(lengths).tolist()
    candidates = config.cost().candidate_tokens(lengths, batch.num_candidates.numpy())
    assert sequences.num_candidates.tolist() == candidates.tolist()
    assert sequences.num_tokens == sum(map(len, expected))
    assert sequences.max_length >= max(map(len, expected))


def test_a_batch_and_embeddings_that_lack_something_are_refused() -> None:
    batch, no_history = make_batch([Sample()]), torch.tensor([False])
    with pytest.raises(ConfigError, match="needs the feature 'country'; batches have user_id, tags, item_id, action"):
        lay_out(batch, replace(CONFIG, contextual=("country",)), predicts_history=no_history)
    with pytest.raises(ConfigError, match="has no max_lengths; iterate over a loader of evenrank or a Balancer"):
        lay_out(batch.replace(max_lengths=None), CONFIG, predicts_history=no_history)
    for feature in ("item_id", "action"):
        embeddings = {name: torch.zeros(0, 6) for name in SIZES if name != feature}
        with pytest.raises(ConfigError, match=f"lack the feature '{feature}', they have .*; create the tables with"):
            lay_out(batch, CONFIG, predicts_history=no_history).arrange(embeddings)


@pytest.mark.parametrize(
    "names",
    [("city", "user.age", "user_age", "a.b.c"), ("type", "items", "training", "_modules", "__class__", "type.")],
)
def test_features_of_any_name_have_a_table(names: tuple[str, ...]) -> None:
    sizes = {name: size for size, name in enumerate(("item_id", "action", *names), start=3)}
    configs = tables(sizes, HSTUConfig(max_length=20, contextual=names, embedding_dim=4))
    assert {feature_of(table.name): table.num_embeddings for table in configs} == sizes
    assert {"item_id", "action"} < {table.name for table in configs}  # plain names stay as they are
    lengths = torch.ones(len(sizes), dtype=torch.int64)
    features = KeyedJaggedTensor.from_lengths_sync([*sizes], torch.arange(len(sizes)) % 3, lengths=lengths)
    found = EmbeddingCollection(tables=configs)(features)
    assert {name: jagged.values().shape for name, jagged in found.items()} == dict.fromkeys(sizes, (1, 4))


def test_a_single_feature_in_place_of_a_tuple_and_triton_on_the_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a tuple of features, got 'user_id'; add a comma behind it"):
        HSTUConfig(max_length=10, contextual="user_id")  # type: ignore[arg-type]
    values = torch.zeros(0, 1, 64)
    with pytest.raises(ConfigError, match="'triton' needs a CUDA device, got cpu; choose 'auto' or 'padded'"):
        ATTENTIONS["triton"](values, values, values, make_sequences([], [], []), scale_length=1)


def test_samples_that_may_be_longer_than_what_weights_are_divided_by_are_refused() -> None:
    model = make_ranking()
    batch = make_batch(random_samples(1)).replace(length_limits={"user_id": 1, "tags": 3, "item_id": 24, "action": 23})
    with pytest.raises(ConfigError, match=r"can have 51 tokens by .* length_limits, but max_length is 50; raise it"):
        model(batch)
    model(batch.replace(length_limits={"user_id": 1, "tags": 3, "item_id": 23, "action": 23}))


def test_positions_count_from_the_first_token_and_candidates_share_the_next_one() -> None:
    positions = PositionEmbedding(4, 1)
    with torch.no_grad():
        positions.weight.copy_(torch.arange(4.0)[:, None])
    sequences = make_sequences([5, 0, 6], [2, 0, 0], [3, 0, 0])
    # The second sample has no tokens; the third is longer than there are buckets.
    assert positions(sequences).flatten().tolist() == [0, 1, 2, 2, 2, 0, 1, 2, 3, 3, 3]


def test_the_last_position_gets_the_gradients_of_all_tokens_that_share_it() -> None:
    positions = PositionEmbedding(4, 1)
    positions(make_sequences([1000, 2, 0, 5], [0] * 4, [0] * 4)).sum().backward()
    assert positions.weight.grad is not None
    assert positions.weight.grad.flatten().tolist() == [3, 3, 2, 997 + 2]
