"""Tokens, layers, ranking and retrieval, beside plain loops over single samples."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity, normalize, silu
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import SequenceBatch
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer
from evenrank.training import label_bits, scale_loss
from hstu import HSTUConfig, HSTULayer, HSTURetrieval, at_least, tables
from hstu.layers import NORM_EPS
from hstu.model import PositionEmbedding, UniformNegatives, arrange, lay_out, with_items
from tests.dataloader.batch_helpers import rows_of
from tests.examples.hstu.samples import (
    CONFIG,
    NUM_TASKS,
    SIZES,
    Sample,
    gradients_of,
    make_batch,
    make_ranking,
    make_retrieval,
    make_sequences,
    random_samples,
    run_quietly,
)
from tests.ranks import RankPool

FIRST = {"user_id": 100, "tags": 200, "item_id": 300, "action": 400}  # what the tokens of a feature begin with


def _one_by_one(sample: Sample, interleave_actions: bool) -> list[int]:
    tokens = [100 + value for value in sample.user_id] + [200 + value for value in sample.tags]
    for index, item in enumerate(sample.item_id):
        tokens.append(300 + item)
        if interleave_actions and index < len(sample.action):
            tokens.append(400 + sample.action[index])
    return tokens


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 6),
    padding=st.integers(0, 2),
    predict=st.sampled_from(["candidates", "candidates-with-actions", "history"]),
    interleave_actions=st.booleans(),
)
def test_tokens_are_those_of_loops_and_are_counted_as_the_cost_does(
    seed: int, count: int, padding: int, predict: str, interleave_actions: bool
) -> None:
    samples = random_samples(count, seed=seed, predict=predict)
    batch = make_batch(samples, rows=count + padding + 1)
    config = replace(CONFIG, interleave_actions=interleave_actions)
    layout = lay_out(batch, config, predicts_history=torch.zeros(batch.batch_size, dtype=torch.bool))
    values = {key: batch.features[key].values()[:, None] + first for key, first in FIRST.items()}
    sequences, tokens = layout.sequences, arrange(values, layout.places).squeeze(1)
    expected = [_one_by_one(sample, interleave_actions) for sample in samples] + [[]] * (padding + 1)
    assert [row.tolist() for row in torch.split(tokens, sequences.lengths.tolist())] == expected
    assert sequences.num_tokens == sum(map(len, expected))
    assert sequences.max_length >= max(map(len, expected))
    lengths = {key: batch.features[key].lengths().numpy().astype("int64") for key in SIZES}
    assert sequences.lengths.tolist() == config.cost().tokens(lengths).tolist()
    candidates = config.cost().candidate_tokens(lengths, batch.num_candidates.numpy())
    assert sequences.num_candidates.tolist() == candidates.tolist()


def test_contextual_tokens_are_none_where_the_history_is_predicted() -> None:
    first = Sample(user_id=[1], tags=[3, 4], item_id=[5, 6, 7], action=[0, 1], num_candidates=1)
    batch = make_batch([first, Sample(user_id=[2], item_id=[8]), replace(first, action=[2, 3, 4])], rows=4)
    sequences = lay_out(batch, CONFIG, predicts_history=torch.tensor([False, False, True, False])).sequences
    assert sequences.offsets.tolist() == [0, 8, 10, 19, 19]
    assert sequences.num_contextual.tolist() == [3, 1, 0, 0]
    assert sequences.num_candidates.tolist() == [1, 0, 2, 0]
    assert sequences.max_length == 1 + 2 + 3 + 3  # the longest of each feature


def test_features_of_any_name_have_a_table() -> None:
    names = ("city", "user.age", "a.b.c", "type", "items", "training", "_modules", "__class__")
    sizes = {name: size for size, name in enumerate(("item_id", "action", *names), start=3)}
    configs = tables(sizes, HSTUConfig(max_length=20, contextual=names, embedding_dim=4))
    assert {table.feature_names[0]: table.num_embeddings for table in configs} == sizes
    lengths = torch.ones(len(sizes), dtype=torch.int64)
    features = KeyedJaggedTensor.from_lengths_sync([*sizes], torch.arange(len(sizes)) % 3, lengths=lengths)
    found = EmbeddingCollection(tables=configs)(features)
    assert {name: jagged.values().shape for name, jagged in found.items()} == dict.fromkeys(sizes, (1, 4))


def test_positions_count_from_the_first_token_candidates_share_the_next_and_the_last_adds_up_all_gradients() -> None:
    positions = PositionEmbedding(4, 1)
    with torch.no_grad():
        positions.weight.copy_(torch.arange(4.0)[:, None])
    # The second sample has no tokens; the third is longer than there are buckets.
    found = positions(make_sequences([5, 0, 6], [2, 0, 0], [3, 0, 0]))
    assert found.flatten().tolist() == [0, 1, 2, 2, 2, 0, 1, 2, 3, 3, 3]
    positions(make_sequences([1000, 2, 0, 5], [0] * 4, [0] * 4)).sum().backward()
    assert [gradient.flatten().tolist() for gradient in gradients_of(positions)] == [[3, 3, 2, 997 + 2]]


def _norm(row: Tensor) -> Tensor:
    return (row - row.mean()) / (row.var(correction=0) + NORM_EPS).sqrt()


def _sees(query: int, key: int, contextual: int, history: int) -> bool:
    return query == key if key >= history else query < contextual or key <= query


def _layer_by_loops(layer: HSTULayer, tokens: Tensor, contextual: int, candidates: int) -> Tensor:
    """Return the output for one sample [tokens, hidden]; the norms have their initial weights."""
    heads, head_dim = CONFIG.heads, CONFIG.head_dim
    weight, bias = (part.view(heads, 4, head_dim, -1) for part in (layer.uvqk.weight, layer.uvqk.bias))
    u, v, q, k = (
        [[silu(weight[head, part] @ _norm(row) + bias[head, part, :, 0]) for head in range(heads)] for row in tokens]
        for part in range(4)
    )
    rows = []
    for i in range(len(tokens)):
        attended = torch.zeros(heads, head_dim, dtype=tokens.dtype)
        for head in range(heads):
            for j in range(len(tokens)):
                if _sees(i, j, contextual, len(tokens) - candidates):
                    score = q[i][head] @ k[j][head] / math.sqrt(head_dim)
                    attended[head] += silu(score) / CONFIG.max_length * v[j][head]
        gated = _norm(attended.flatten()) * torch.cat(u[i])
        rows.append(tokens[i] + layer.output.weight @ gated + layer.output.bias)
    return torch.stack(rows)


def test_a_layer_is_its_equations_and_dropout_is_before_its_output() -> None:
    torch.manual_seed(0)
    layer = HSTULayer(replace(CONFIG, dropout=0.999999)).double()
    tokens, update = torch.randn(2, 9, CONFIG.hidden, dtype=torch.float64)
    sequences = make_sequences([6, 0, 3], [2, 0, 0], [2, 0, 1])
    expected = torch.cat([_layer_by_loops(layer, tokens[:6], 2, 2), _layer_by_loops(layer, tokens[6:], 0, 1)])
    stream, dropped = layer(tokens - update, update, sequences)
    torch.testing.assert_close(stream, tokens)
    torch.testing.assert_close(dropped, layer.output.bias.expand_as(tokens))  # nothing but the bias is left
    torch.testing.assert_close(sum(layer.eval()(tokens - update, update, sequences)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_with_recompute_gradients_are_equal_bit_for_bit_and_activations_are_not_kept(autocast: bool) -> None:
    results, kept = [], []
    for recompute in (False, True):
        model = make_ranking(replace(CONFIG, dropout=0.3, layers=3, recompute=recompute))
        model = model.float() if autocast else model
        sizes: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.nbytes) or t, lambda t: t)  # type: ignore[misc]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
            loss_sums, logits = model(make_batch(random_samples(12)))
        loss_sums.sum().backward()
        results.append((logits.detach(), gradients_of(model)))
        kept.append(sum(sizes))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert kept[1] < 0.4 * kept[0]


SAMPLE = Sample(user_id=[3], tags=[1, 2], item_id=[4, 5, 6, 7, 8], action=[1, 2, 3], num_candidates=2, labels=[5, 6])
HISTORY = Sample(user_id=[3], tags=[1, 2], item_id=[4, 5, 6, 7], action=[1, 2, 3, 4], labels=[1, 2, 3, 4])


def _is_equal(sample: Sample, **changes: Any) -> list[bool]:
    """Return which logits of a sample stay as they are if its features change."""
    logits, others = (make_ranking()(make_batch([one]))[1].detach() for one in (sample, replace(sample, **changes)))
    return torch.isclose(logits, others, rtol=1e-12, atol=0).all(1).tolist()


def _changed(values: list[int], index: int) -> list[int]:
    return [*values[:index], values[index] - 1, *values[index + 1 :]]


def test_candidates_see_the_history_and_the_context_and_not_each_other() -> None:
    for name, count in (("user_id", 1), ("tags", 2), ("action", 3), ("item_id", 3)):
        for index in range(count):
            assert _is_equal(SAMPLE, **{name: _changed(getattr(SAMPLE, name), index)}) == [False, False], (name, index)
    assert _is_equal(SAMPLE, item_id=_changed(SAMPLE.item_id, 3)) == [False, True]
    assert _is_equal(SAMPLE, item_id=_changed(SAMPLE.item_id, 4)) == [True, False]
    with_actions = replace(SAMPLE, action=[1, 2, 3, 4, 5])
    assert _is_equal(with_actions, action=[1, 2, 3, 0, 1]) == [True, True]


def test_a_label_of_the_history_cannot_be_known_before_it_happens() -> None:
    for index in range(4):
        assert _is_equal(HISTORY, item_id=_changed(HISTORY.item_id, index)) == [step < index for step in range(4)]
        # Its own logit is that of the item's token, which comes first.
        assert _is_equal(HISTORY, action=_changed(HISTORY.action, index)) == [step <= index for step in range(4)]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), data=st.data(), predict=st.sampled_from(["candidates", "history"]))
def test_logits_do_not_depend_on_the_other_samples_of_a_batch(seed: int, data: st.DataObject, predict: str) -> None:
    samples, model = random_samples(5, seed=seed, predict=predict), make_ranking()

    def by_sample(rows: list[int], padding: int) -> dict[int, Tensor]:
        batch = make_batch([samples[row] for row in rows], rows=len(rows) + padding)
        assert batch.labels is not None
        counts = batch.labels.lengths().tolist()[: len(rows)]
        return dict(zip(rows, torch.split(model(batch)[1].detach(), counts), strict=True))

    together, order = by_sample(list(range(5)), 0), data.draw(st.permutations(range(5)))
    cut = data.draw(st.integers(1, 4))
    for rows in (order[:cut], order[cut:]):
        for row, logits in by_sample(rows, data.draw(st.integers(0, 3))).items():
            torch.testing.assert_close(logits, together[row], rtol=1e-12, atol=1e-12)


def test_loss_sums_are_those_of_the_tasks() -> None:
    batch = make_batch(random_samples(4))
    assert batch.labels is not None
    loss_sums, logits = make_ranking()(batch)
    targets = label_bits(batch.labels["label"].values(), NUM_TASKS).double()
    assert logits.shape == targets.shape == (batch.loss_tokens, NUM_TASKS)
    for task in range(NUM_TASKS):
        expected = binary_cross_entropy_with_logits(logits[:, task], targets[:, task], reduction="sum")
        torch.testing.assert_close(loss_sums[task], expected)
    assert at_least(7)(torch.tensor([6, 7, 9])).tolist() == [[0], [1], [1]]  # one binary task


def test_a_batch_without_samples_gives_every_parameter_a_zero_gradient() -> None:
    ranking, retrieval, empty = make_ranking(replace(CONFIG, recompute=True)), make_retrieval(), make_batch([], rows=3)
    for model, batch in ((ranking, empty), (retrieval, empty.replace(labels=None))):
        loss_sums, logits = model(batch)
        assert len(logits) == 0
        loss_sums.sum().backward()
        assert not any(gradient.any() for gradient in gradients_of(model))
    assert retrieval.places_of_targets(empty).tolist() == []


ROWS, STEPS, WORLD_SIZE = 3, 3, 4


def _samples(step: int, task: str) -> list[Sample]:
    count = WORLD_SIZE * ROWS if step < STEPS - 1 else ROWS  # in the last step, ranks have nothing
    return random_samples(count, seed=step, predict="next" if task == "retrieval" else task)


def _batch(samples: list[Sample], rows: int, step: int, task: str) -> SequenceBatch:
    batch = make_batch(samples, rows=rows).replace(position=step + 1)  # a Balancer counts steps over a list
    return batch.replace(labels=None) if task == "retrieval" else batch


def _train(rank: int, world_size: int, task: str, strategies: tuple[str, ...]) -> dict[str, tuple[Any, int]]:
    """Return by strategy the gradients of each step, and how many batches have changed."""
    model = DistributedDataParallel(make_retrieval() if task == "retrieval" else make_ranking())
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    batches = [_batch(_samples(step, task)[mine], ROWS, step, task) for step in range(STEPS)]
    results = {}
    for strategy in strategies:
        gradients, num_changed = [], 0
        with Balancer(batches, BalanceConfig(cost=CONFIG.cost(), strategy=strategy)) as balancer:
            for batch, loaded in zip(balancer, batches, strict=True):
                loss_sums, _ = model(batch)
                scale_loss(loss_sums.sum(), batch).backward()
                gradients.append(gradients_of(model))
                num_changed += batch.features.length_per_key() != loaded.features.length_per_key()
        results[strategy] = gradients, num_changed
    return results


@pytest.mark.parametrize(
    ("task", "strategies"),
    [("candidates", tuple(STRATEGIES)), ("history", ("lpt-swap",)), ("retrieval", ("lpt-swap",))],
)
def test_balanced_gradients_equal_those_of_one_process(ranks: RankPool, task: str, strategies: tuple[str, ...]) -> None:
    model: nn.Module = make_retrieval() if task == "retrieval" else make_ranking()
    expected = []
    for step in range(STEPS):
        samples = _samples(step, task)
        batch = _batch(samples, len(samples), step, task)
        (model(batch)[0].sum() / batch.loss_tokens).backward()
        expected.append(gradients_of(model))
    results = ranks.run(WORLD_SIZE, _train, task, strategies)
    for strategy in strategies:
        for result in results:
            torch.testing.assert_close(result[strategy][0], expected, rtol=1e-10, atol=1e-10)
        assert (sum(result[strategy][1] for result in results) > 0) == (strategy != "none")


NEXT = Sample(user_id=[3], tags=[1], item_id=[4, 5, 6, 7], action=[1, 2, 3, 4])


def _items(model: HSTURetrieval) -> Tensor:
    return model.get_parameter("embeddings.tables.table:item_id.weight").detach()


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
    batch = make_batch([NEXT, Sample(user_id=[1], item_id=[2], action=[0]), Sample(tags=[1])], rows=4)
    loss_sums, log_probabilities = model(batch)
    negatives = rows_of(model.negatives(batch), "negative_id")[0]
    items, queries = _items(model), _queries(model, batch)[0]
    expected = []
    for index, target in enumerate(NEXT.item_id[1:]):
        query = queries[2 + 2 * index + 1]  # after 2 contextual tokens, that of the item's action
        scores = cosine_similarity(query[None], items[[target, *(item for item in negatives if item != target)]]) / 0.1
        expected.append(scores.log_softmax(0)[0])
    assert len(set(negatives) & set(NEXT.item_id[1:])) > 0  # accidental hits
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
    model, other = make_retrieval(replace(CONFIG, interleave_actions=interleave)), replace(NEXT, item_id=items)
    samples = (NEXT, replace(other, action=actions))
    before, after = (model(make_batch([sample]))[1].squeeze(1) for sample in samples)
    assert torch.isclose(before, after, rtol=1e-12, atol=0).tolist() == expected


@pytest.mark.parametrize("chunk", [7, 1000])
def test_places_are_those_among_all_items_and_of_nan_the_last(chunk: int) -> None:
    model, samples = make_retrieval().eval(), random_samples(10, predict="next")
    batch = make_batch(samples, rows=12)
    expected = []
    for sample, queries in zip(samples, _queries(model, batch), strict=False):
        if len(sample.item_id) >= 2:
            scores = cosine_similarity(queries[-3][None], _items(model))  # the last two are the target and its action
            expected.append(1 + (scores > scores[sample.item_id[-1]]).sum().item())
    assert 0 < len(expected) < 10
    assert model.places_of_targets(batch, chunk=chunk).tolist() == expected
    nn.init.constant_(model.dense.lower_width.weight, torch.nan)  # as of a model that has diverged
    assert model.places_of_targets(make_batch([NEXT]), chunk=chunk).tolist() == [SIZES["item_id"]]


def test_a_candidate_is_ranked_by_the_history_alone_and_has_no_place_without_one() -> None:
    model = make_retrieval().eval()
    (place,) = model.places_of_targets(make_batch([NEXT])).tolist()
    as_candidate = replace(NEXT, action=[1, 2, 3], num_candidates=1, labels=[4])
    among_others = [
        replace(as_candidate, item_id=[4, 5, 6, other, 7], num_candidates=2, labels=[4, 4])
        for other in range(SIZES["item_id"])
    ]
    without = [Sample(user_id=user, item_id=[4, 5], num_candidates=2, labels=[1, 1]) for user in ([], [3])]
    batch = make_batch([as_candidate, *without, *among_others])
    assert model.places_of_targets(batch).tolist() == [place] * (1 + len(among_others))


def test_scores_are_compared_in_float32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_retrieval().float().eval(), make_batch(random_samples(300, predict="next"))

    def random_queries(tokens: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return normalize(torch.randn(len(tokens), CONFIG.embedding_dim, generator=generator))

    monkeypatch.setattr(model.dense, "query", random_queries)
    places = model.places_of_targets(batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.places_of_targets(batch).tolist() == places.tolist()


def test_negatives_are_those_of_the_step_whatever_samples_a_rank_has() -> None:
    draw = UniformNegatives(1000, 50, seed=1)
    first = make_batch(random_samples(3), rows=4).replace(epoch=2, position=48, step=5)
    other = make_batch(random_samples(1, seed=1)).replace(epoch=2, position=48, step=0)  # resumed, on another rank
    features = draw(first)
    negatives = rows_of(features, "negative_id")
    assert [len(row) for row in negatives] == [50, 0, 0, 0]
    assert 0 <= min(negatives[0]) < 100
    assert 900 <= max(negatives[0]) < 1000
    assert rows_of(draw(other), "negative_id") == negatives[:1]
    others = [draw(first.replace(epoch=3)), draw(first.replace(position=49)), UniformNegatives(1000, 50, seed=2)(first)]
    assert all(rows_of(one, "negative_id") != negatives for one in others)
    alone = with_items(first.features, torch.tensor([7]), are_alone=True)
    for key in SIZES:
        assert rows_of(features, key) == rows_of(first.features, key)
        assert rows_of(alone, key) == [[]] * 4
    assert rows_of(alone, "negative_id") == [[7], [], [], []]


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["padded", "triton"])
@pytest.mark.parametrize("task", ["ranking", "retrieval"])
def test_a_step_does_not_synchronize(task: str, attention: str, recompute: bool) -> None:
    head_dim = CONFIG.head_dim if attention == "padded" else 64
    config = replace(CONFIG, attention=attention, head_dim=head_dim, recompute=recompute, dropout=0.1)
    is_retrieval = task == "retrieval"
    model: nn.Module = make_retrieval(config) if is_retrieval else make_ranking(config)
    model.embeddings = EmbeddingCollection(tables=tables(SIZES, config, retrieval=is_retrieval))
    model.float().cuda()
    batch = make_batch(random_samples(8, predict="next" if is_retrieval else "candidates"), rows=10).to("cuda")
    run_quietly(lambda: model(batch)[0].sum().backward())
    assert all(gradient.isfinite().all() for gradient in gradients_of(model))


def test_the_first_block_of_the_readme_trains(small_dataset: Path) -> None:
    readme = Path(__file__).parents[3] / "examples" / "hstu" / "README.md"
    (block, *_) = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"path": small_dataset}
    exec(block, names)
    assert names["logits"].shape == (names["batch"].loss_tokens, 1)
    assert all(torch.any(parameter.grad) for parameter in names["model"].dense.encoder.layers.parameters())
