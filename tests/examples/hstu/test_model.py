"""Tokens, layers and ranking, beside plain loops over single samples; initial values and rows of the tables."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, silu
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hstu.embeddings
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.training import label_bits
from hstu import HSTUConfig, HSTULayer, at_least, tables
from hstu.embeddings import EQUAL_ROWS, EqualRows, fill_rows
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


def _one_by_one(sample: Sample, interleave_actions: bool) -> list[int]:
    """Return the tokens of a sample, which begin with the hundred of their feature."""
    tokens = [100 + value for value in sample["user_id"]] + [200 + value for value in sample["tags"]]
    for index, item in enumerate(sample["item_id"]):
        tokens.append(300 + item)
        if interleave_actions and index < len(sample["action"]):
            tokens.append(400 + sample["action"][index])
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
    values = {key: batch.features[key].values()[:, None] + 100 * number for number, key in enumerate(SIZES, start=1)}
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


def _layer_by_loops(layer: HSTULayer, tokens: Tensor, contextual: int, candidates: int) -> Tensor:
    """Return the output for one sample [tokens, hidden]; the norms have their initial weights."""
    heads, head_dim, history = CONFIG.heads, CONFIG.head_dim, len(tokens) - candidates
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
                if i == j if j >= history else i < contextual or j <= i:
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


HISTORY: Sample = {"user_id": [3], "tags": [1, 2], "item_id": [4, 5, 6, 7], "action": [1, 2, 3, 4], "labels": [0] * 4}
SAMPLE: Sample = {**HISTORY, "item_id": [4, 5, 6, 7, 8], "action": [1, 2, 3], "num_candidates": 2, "labels": [5, 6]}


@pytest.mark.parametrize(
    ("sample", "name", "index", "expected"),
    [
        # Candidates see the history and the context, but not each other.
        *((SAMPLE, name, index, [False] * 2) for name, index in (("user_id", 0), ("tags", 0), ("tags", 1))),
        *((SAMPLE, name, index, [False] * 2) for name in ("action", "item_id") for index in range(3)),
        *((SAMPLE, "item_id", 3, [False, True]), (SAMPLE, "item_id", 4, [True, False])),
        *(({**SAMPLE, "action": [1, 2, 3, 4, 5]}, "action", index, [True] * 2) for index in (3, 4)),
        # A label of the history is not known before it happens; its logit is that of the item's token, which is first.
        *((HISTORY, "item_id", index, [step < index for step in range(4)]) for index in range(4)),
        *((HISTORY, "action", index, [step <= index for step in range(4)]) for index in range(4)),
    ],
)
def test_a_value_changes_exactly_the_logits_that_see_it(
    sample: Sample, name: str, index: int, expected: list[bool]
) -> None:
    other = {**sample, name: [value - (place == index) for place, value in enumerate(sample[name])]}
    logits, others = (make_ranking()(make_batch([one]))[1].detach() for one in (sample, other))
    assert torch.isclose(logits, others, rtol=1e-12, atol=0).all(1).tolist() == expected


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    order=st.permutations(range(5)),
    cut=st.integers(1, 4),
    padding=st.integers(0, 3),
    predict=st.sampled_from(["candidates", "history"]),
)
def test_logits_do_not_depend_on_the_other_samples_of_a_batch(
    seed: int, order: list[int], cut: int, padding: int, predict: str
) -> None:
    samples, model = random_samples(5, seed=seed, predict=predict), make_ranking()

    def by_sample(rows: list[int], padding: int) -> dict[int, Tensor]:
        batch = make_batch([samples[row] for row in rows], rows=len(rows) + padding)
        counts = [len(samples[row]["labels"]) for row in rows]
        return dict(zip(rows, torch.split(model(batch)[1].detach(), counts), strict=True))

    together = by_sample([*range(5)], 0)
    for row, logits in (by_sample(order[:cut], padding) | by_sample(order[cut:], 0)).items():
        torch.testing.assert_close(logits, together[row], rtol=1e-12, atol=1e-12)


def test_loss_sums_are_those_of_the_tasks_and_gradients_are_zero_without_samples() -> None:
    batch = make_batch(random_samples(4))
    assert batch.labels is not None
    loss_sums, logits = make_ranking()(batch)
    targets = label_bits(batch.labels["label"].values(), NUM_TASKS).double()
    assert logits.shape == targets.shape == (batch.loss_tokens, NUM_TASKS)
    expected = binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=0)
    torch.testing.assert_close(loss_sums, expected)
    assert at_least(7)(torch.tensor([6, 7, 9])).tolist() == [[0], [1], [1]]  # one binary task
    model = make_ranking(replace(CONFIG, recompute=True))
    model(make_batch([], rows=3))[0].sum().backward()
    assert not any(gradient.any() for gradient in gradients_of(model))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("attention", "head_dim"), [("padded", 4), ("triton", 64)])
def test_a_step_does_not_synchronize(attention: str, head_dim: int, recompute: bool) -> None:
    config = replace(CONFIG, attention=attention, head_dim=head_dim, recompute=recompute, dropout=0.1)
    model = make_ranking(config).float().cuda()
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


ROWS = 50


def _fill(
    first: int, last: int, *, name: str = "items", seed: int = 3, rows: int = ROWS, device: str = "cpu"
) -> Tensor:
    table = EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=["item_id"])
    part = torch.full((last - first, 4), math.nan, device=device)
    fill_rows(part, table, first_row=first, seed=seed)
    return part


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, ROWS), max_size=5).map(sorted), block=st.integers(3, ROWS + 10))
def test_initial_values_of_parts_are_those_of_the_whole_table(cuts: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hstu.embeddings, "BLOCK_ROWS", block)
        parts = [_fill(first, last) for first, last in zip([0, *cuts], [*cuts, ROWS], strict=True)]
        assert torch.equal(torch.cat(parts), _fill(0, ROWS))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_initial_values_are_of_the_tables_own_distribution_and_state(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    before = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    values = _fill(60_000, 75_000, rows=75_000, device=device)  # over the end of a block
    torch.testing.assert_close([torch.get_rng_state(), *torch.cuda.get_rng_state_all()], before, rtol=0, atol=0)
    limit = 75_000**-0.5  # TorchRec's default
    assert float(values.abs().max()) == pytest.approx(limit, rel=1e-3)
    assert float(values.mean()) == pytest.approx(0, abs=0.02 * limit)
    # Rows, blocks, tables and seeds differ.
    monkeypatch.setattr(hstu.embeddings, "BLOCK_ROWS", 16)
    drawn = torch.cat([_fill(0, ROWS), _fill(0, ROWS, name="users"), _fill(0, ROWS, seed=4)])
    assert drawn.unique().numel() > 0.99 * drawn.numel()


def test_equal_rows_keep_the_values_and_differ_by_one_at_most() -> None:
    lengths = np.array([[3000, 1, 0], [0, 0, 0], [2, 3, 5]], dtype=np.int32)
    features = keyed_jagged_tensor(["item", "empty", "user"], torch.arange(lengths.sum()), lengths)
    divided = EqualRows()(features)
    assert (divided.keys(), divided.stride()) == (features.keys(), EQUAL_ROWS)
    assert divided.length_per_key_or_none() == [3001, 0, 10]  # known to the host
    assert divided.lengths().dtype == features.lengths().dtype
    for key in features.keys():  # noqa: SIM118
        assert torch.equal(divided[key].values(), features[key].values())
    assert divided["item"].lengths().tolist() == [3] * (3001 - 2 * EQUAL_ROWS) + [2] * (3 * EQUAL_ROWS - 3001)
