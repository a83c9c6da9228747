"""Tokens, layers and ranking, beside plain loops over single samples."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, silu
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenrank.dataloader import SequenceBatch
from evenrank.dataloader.balance import STRATEGIES, BalanceConfig, Balancer
from evenrank.training import label_bits, scale_loss
from hstu import HSTUConfig, HSTULayer, at_least, tables
from hstu.layers import NORM_EPS
from hstu.model import PositionEmbedding, arrange, lay_out
from tests.examples.hstu.samples import (
    CONFIG,
    NUM_TASKS,
    SIZES,
    Sample,
    gradients_of,
    make_batch,
    make_ranking,
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
    model = make_ranking(replace(CONFIG, recompute=True))
    loss_sums, logits = model(make_batch([], rows=3))
    assert len(logits) == 0
    loss_sums.sum().backward()
    assert not any(gradient.any() for gradient in gradients_of(model))


ROWS, STEPS, WORLD_SIZE = 3, 3, 4


def _batch(step: int, predict: str, ranks: slice) -> SequenceBatch:
    """Return the batch of some ranks; in the last step, all but the first have nothing."""
    count = WORLD_SIZE * ROWS if step < STEPS - 1 else ROWS
    mine = slice(ranks.start * ROWS, ranks.stop * ROWS)
    return make_batch(random_samples(count, seed=step, predict=predict)[mine], rows=mine.stop - mine.start)


def _train(rank: int, world_size: int, predict: str, strategies: tuple[str, ...]) -> dict[str, tuple[Any, int]]:
    """Return by strategy the gradients of each step, and how many batches have changed."""
    model = DistributedDataParallel(make_ranking())
    batches = [_batch(step, predict, slice(rank, rank + 1)) for step in range(STEPS)]
    results = {}
    for strategy in strategies:
        gradients, num_changed = [], 0
        with Balancer(batches, BalanceConfig(cost=CONFIG.cost(), strategy=strategy)) as balancer:
            for batch, loaded in zip(balancer, batches, strict=True):
                scale_loss(model(batch)[0].sum(), batch).backward()
                gradients.append(gradients_of(model))
                num_changed += batch.features.length_per_key() != loaded.features.length_per_key()
        results[strategy] = gradients, num_changed
    return results


@pytest.mark.parametrize(("predict", "strategies"), [("candidates", tuple(STRATEGIES)), ("history", ("lpt-swap",))])
def test_balanced_gradients_equal_those_of_one_process(
    ranks: RankPool, predict: str, strategies: tuple[str, ...]
) -> None:
    model, expected = make_ranking(), []
    for step in range(STEPS):
        batch = _batch(step, predict, slice(0, WORLD_SIZE))
        (model(batch)[0].sum() / batch.loss_tokens).backward()
        expected.append(gradients_of(model))
    results = ranks.run(WORLD_SIZE, _train, predict, strategies)
    for strategy in strategies:
        for result in results:
            torch.testing.assert_close(result[strategy][0], expected, rtol=1e-10, atol=1e-10)
        assert (sum(result[strategy][1] for result in results) > 0) == (strategy != "none")


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("attention", "head_dim"), [("padded", 4), ("triton", 64)])
def test_a_step_does_not_synchronize(attention: str, head_dim: int, recompute: bool) -> None:
    config = replace(CONFIG, attention=attention, head_dim=head_dim, recompute=recompute, dropout=0.1)
    model = make_ranking(config)
    model.embeddings = EmbeddingCollection(tables=tables(SIZES, config))
    model.float().cuda()
    batch = make_batch(random_samples(8), rows=10).to("cuda")
    run_quietly(lambda: model(batch)[0].sum().backward())
    assert all(gradient.isfinite().all() for gradient in gradients_of(model))


def test_the_first_block_of_the_readme_trains(small_dataset: Path) -> None:
    readme = Path(__file__).parents[3] / "examples" / "hstu" / "README.md"
    (block, *_) = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"path": small_dataset}
    exec(block, names)
    assert names["logits"].shape == (names["batch"].loss_tokens, 1)
    assert all(torch.any(parameter.grad) for parameter in names["model"].dense.encoder.layers.parameters())
