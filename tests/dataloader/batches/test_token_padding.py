"""Totals of tokens that are padded to few: rows and values of padding, what stays as it is, and what is compiled."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection

from evenrank.core.errors import ConfigError, RankError
from evenrank.dataloader import (
    ElasticLoader,
    ElasticSampler,
    JaggedCollate,
    LoaderConfig,
    LossKey,
    PaddedBatches,
    RandomBatches,
    RandomData,
    RandomFeature,
    SemanticIdBatch,
    SequenceBatch,
    build_loader,
    build_stream_loader,
    dense,
    jagged,
    random_codes,
)
from evenrank.dataloader.balance import BalanceConfig, Balancer, StepMetrics
from evenrank.dataloader.balance.config import EXCHANGES
from evenrank.dataloader.batches.padding import pad_tokens, without_token_padding
from evenrank.dataloader.batches.tensors import keyed_jagged_tensor
from evenrank.dataloader.batches.token_padding import PaddedKey, TokenPadding
from evenrank.datasets import read_manifest
from evenrank.datasets.distributions import Uniform
from evenrank.training import batch_work, in_batch_mask, scale_loss
from hstu import HSTUConfig, HSTURanking, at_least, tables
from next_item import NextItem
from tests.dataloader.balance.batch_bits import bits_of
from tests.dataloader.balance.costs import item_tokens, one_per_sample, rich_tokens
from tests.dataloader.rich_batch import rich_batch
from tests.ranks import RankPool

STEPS = st.integers(1, 40) | st.sets(st.integers(1, 60), min_size=1, max_size=4).map(lambda given: tuple(sorted(given)))


@given(
    steps=STEPS,
    samples=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=9),
    padding=st.integers(0, 3),
    candidates=st.integers(0, 3),
)
def test_padding_rows_are_like_samples_and_totals_are_those_that_were_asked_for(
    steps: int | tuple[int, ...], samples: list[tuple[int, int]], padding: int, candidates: int
) -> None:
    keys = (("features", "item_id"), ("features", "action"), ("features", "user_id"), ("labels", "label"))
    limits = [(candidates, candidates + 12), (0, 12), (1, 1)]
    padded = tuple(PaddedKey(*key, *of) for key, of in zip(keys, limits, strict=False))
    rule = TokenPadding(steps=steps, keys=padded, of_same_events=True)
    history, targets = [size for size, _ in samples], [min(count, candidates) for _, count in samples]
    num_real, total = len(history), sum(history)
    rows = [[sum(of) for of in zip(history, targets, strict=True)], history, [1] * num_real, targets]
    lengths = np.array([row + [0] * (padding + rule.rows) for row in rows], dtype=np.int64).reshape(4, -1)
    of_all = steps if isinstance(steps, tuple) else tuple(range(steps, 9 * 12 + steps, steps))
    totals = [of for of in of_all if of >= total]
    if not totals:
        with pytest.raises(ConfigError, match=f"^a rank has {total} values of item_id, but the largest total of pad_"):
            rule.fill(keys, lengths, num_real)
        return
    rule.fill(keys, lengths, num_real)
    items, actions, users, labels = lengths.tolist()
    assert [row[:num_real] for row in (items, actions, users, labels)] == rows
    assert sum(actions) == totals[0]
    assert items[num_real:] == [action + candidates for action in actions[num_real:]]
    assert max(actions[num_real:]) <= 12
    assert max(actions[num_real:]) - min(actions[num_real:]) <= 1
    assert users == [1] * len(users)
    assert not any(labels[num_real:])


def test_rows_that_are_added_are_as_many_as_the_largest_gap_and_the_shortest_limit_need() -> None:
    keys = PaddedKey("features", "a", 1, 51), PaddedKey("features", "b", 0, None), PaddedKey("features", "c", 1, 1)
    for steps, rows in ((1, 1), (50, 1), (51, 2), (512, 11), ((1024,), 21), ((10, 110, 130), 2), ((100, 110), 2)):
        assert TokenPadding(steps=steps, keys=keys).rows == rows, steps
    assert TokenPadding(steps=512, keys=keys[1:]).rows == 1


RICH = TokenPadding(steps=8, keys=tuple(PaddedKey(*key, 0, None) for key in (("first", "a"), ("weighted", "c"))))
CODES = random_codes(600, levels=3, codebook_size=8)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_candidates": 2, "user_id": True, "extra_events": ("timestamp_ms",)},
    {"max_num_candidates": 1, "candidate_actions": True},
    {"num_tasks": 2},
    {"codes": CODES, "candidate_feature": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "items")
@pytest.mark.parametrize("steps", [64, (64, 256, 1024, 4096)], ids=str)
def test_batches_are_those_without_padding_with_few_totals(
    small_dataset: Path, options: dict[str, Any], steps: int | tuple[int, ...]
) -> None:
    config = LoaderConfig(batch_size=7, max_history_length=40, **options)
    plain, padded = (
        list(build_loader(small_dataset, dataclasses.replace(config, pad_tokens_to=of), rank=0, world_size=1))
        for of in (None, steps)
    )
    shapes = set()
    for before, batch in zip(plain, padded, strict=True):
        assert bits_of(without_token_padding(batch).replace(token_padding=None)) == bits_of(before)
        assert bits_of(batch.index_select(range(batch.num_real)).replace(token_padding=None)) == bits_of(
            before.index_select(range(before.num_real))
        )
        assert batch.max_lengths is not None
        assert all(batch.max_lengths[name] <= limit for name, limit in (batch.length_limits or {}).items())
        for name in ("epoch", "step", "position", "loss_tokens", "num_real"):
            assert getattr(batch, name) == getattr(before, name)
        for key in batch.features.keys():  # noqa: SIM118  # a KeyedJaggedTensor
            is_real, values = batch.real_values(key), batch.features[key].values()
            assert values[is_real].equal(before.features[key].values())
            assert not values[~is_real].any()
        if isinstance(batch, SequenceBatch):
            assert in_batch_mask(batch).equal(in_batch_mask(before))
        assert pad_tokens(batch, batch.token_padding) is batch
        shapes.add((batch.batch_size, *batch.features.length_per_key()))
    assert len(shapes) <= len(plain) / 2
    *_, event = (key for key in plain[0].features.keys() if key in ("item_id", "semantic_id"))  # noqa: SIM118
    of_events = {shape[1 + plain[0].features.keys().index(event)] - _least(options) * shape[0] for shape in shapes}
    assert of_events <= ({*range(0, 1 << 14, 64)} if isinstance(steps, int) else {*steps})


def _least(options: dict[str, Any]) -> int:
    return 0 if "codes" in options else int(options.get("max_num_candidates", 0))


_padded_numbers = JaggedCollate({"item_id": jagged(max_length=10)}, pad_tokens_to=64)


def test_batches_of_anyone_are_padded_key_by_key_also_by_padded_batches_and_a_balancer() -> None:
    declared = {"item_id": jagged(max_length=9), "kind": jagged(max_length=1), "more": jagged(), "y": dense(-1)}
    declared |= {"label": jagged(field="labels")}
    collate = JaggedCollate(declared, loss_key=LossKey("labels", "label"), pad_tokens_to=(8, 24))
    samples = [{"item_id": [3] * (i % 7), "kind": 1, "more": [2] * i, "y": i, "label": [1]} for i in range(5)]
    batch = collate(samples)
    assert (batch.batch_size, batch.num_real, batch.loss_tokens) == (5 + 2, 5, 5)
    assert batch.features["item_id"].lengths().tolist() == [0, 1, 2, 3, 4, 7, 7]
    assert batch.features["more"].lengths().tolist() == [0, 1, 2, 3, 4, 7, 7]
    assert batch.features["kind"].lengths().tolist() == [1] * 7
    assert batch.labels["label"].lengths().tolist() == [1] * 5 + [0, 0]
    assert batch.y.tolist() == [0, 1, 2, 3, 4, -1, -1]
    assert collate([samples[0]]).features["item_id"].lengths().tolist() == [0, 4, 4]
    loaded = list(PaddedBatches(samples, batch_size=3, collate=collate, num_batches=3))
    assert [(of.batch_size, of.num_real, *of.features.length_per_key()) for of in loaded] == [
        (5, 3, 8, 5, 8),
        (5, 2, 8, 5, 8),
        (5, 0, 8, 5, 8),
    ]
    (empty,) = PaddedBatches([], batch_size=1, collate=_padded_numbers, num_batches=1)
    assert (empty.batch_size, empty.num_real, empty.features.length_per_key()) == (1 + 7, 0, [64])
    balanced = list(Balancer(loaded[:2], BalanceConfig(cost=item_tokens)))
    assert [(of.batch_size, of.num_real, *of.features.length_per_key()) for of in balanced] == [
        (5, 3, 8, 5, 8),
        (5, 2, 8, 5, 8),
    ]


def test_weights_of_values_and_values_of_any_shape_are_padded_too() -> None:
    batch = rich_batch([[(2, 1), (1, 2)], [(3, 1), (1, 1)]])
    padded = pad_tokens(batch, RICH)
    assert padded.first.length_per_key() == [8, batch.first.length_per_key()[1]]
    assert padded.weighted.length_per_key() == [batch.weighted.length_per_key()[0], 8]
    assert len(padded.weighted.weights()) == len(padded.weighted.values())
    assert padded.first.lengths().dtype == batch.first.lengths().dtype
    assert not padded.weighted["c"].weights()[padded.real_values("c", field="weighted").logical_not()].any()
    plain = without_token_padding(padded).replace(token_padding=None, max_lengths=None)
    assert bits_of(plain) == bits_of(batch)


def _exchanged(rank: int, world_size: int, exchange: str) -> list[list[Any]]:
    """Return batches that were padded before and after a Balancer."""
    of_rank = [rich_batch([[(2, 1), (1, 2)], [(3 * rank, 5), (step, 1)]], 10 * rank + 5 * step) for step in range(3)]
    config = BalanceConfig(cost=rich_tokens, exchange=exchange, batch_size=4)
    before, after = (list(Balancer(batches, config)) for batches in ([pad_tokens(of, RICH) for of in of_rank], of_rank))
    return [[bits_of(batch) for batch in batches] for batches in (before, [pad_tokens(of, RICH) for of in after])]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_exchange_pads_as_the_host_does(ranks: RankPool, world_size: int, exchange: str) -> None:
    for before, after in ranks.run(world_size, _exchanged, exchange):
        assert len(before) == 3
        assert before == after


MOST_TOKENS = 90


def _failure(rank: int, world_size: int, path: Path, way: str) -> tuple[int, str]:
    """Return in which step a job ends, and with which error."""
    balance = BalanceConfig(cost=one_per_sample)  # so that ranks have different totals
    config = LoaderConfig(batch_size=2, pad_tokens_to=(2, MOST_TOKENS), prefetch=1)
    own = balance if way == "alone" else None
    batches: Any = build_loader(path, config, rank=rank, world_size=world_size, balance=own)
    num_taken = 0
    try:
        for _ in batches if own else Balancer(batches, balance):
            num_taken += 1
    except (ConfigError, RankError) as error:
        return num_taken, str(error)
    return num_taken, ""


@pytest.mark.parametrize(("way", "begin"), [("alone", ""), ("Balancer", r"(rank \d failed: )?")])
def test_all_ranks_raise_the_error_of_a_total_that_is_too_large_in_the_same_step(
    ranks: RankPool, small_dataset: Path, way: str, begin: str
) -> None:
    failures = ranks.run(2, _failure, small_dataset, way)
    assert len({num_taken for num_taken, _ in failures}) == 1
    for _, error in failures:
        assert re.match(
            begin + rf"a rank has \d+ values of item_id, but the largest total of pad_tokens_to is {MOST_TOKENS}; ",
            error,
        )


def test_padding_rows_have_equal_histories_in_all_keys_where_samples_have_fewer_candidates(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="data is made with Polars, which hosts that only train lack")
    from evenrank.preprocess import PreprocessConfig, SyntheticConfig, preprocess

    made: dict[str, Any] = {"split": "leave-last:1", "synthetic": SyntheticConfig(num_users=30)}
    preprocess(PreprocessConfig(dataset="synthetic", out=tmp_path / "out", **made))
    config = LoaderConfig(split="eval", batch_size=12, max_history_length=40, max_num_candidates=8, pad_tokens_to=64)
    for batch in build_loader(tmp_path / "out", config, rank=0, world_size=1):
        assert {*batch.num_candidates[: batch.num_real].tolist()} == {1}
        items, actions = (batch.features[key].lengths() for key in ("item_id", "action"))
        assert items[batch.num_real :].equal(actions[batch.num_real :] + 8)
        assert actions.sum() % 64 == 0


def test_streams_and_elastic_loaders_pad_too(small_dataset: Path) -> None:
    config = LoaderConfig(batch_size=9, max_history_length=40)
    plain, padded = (
        list(build_stream_loader(small_dataset, dataclasses.replace(config, pad_tokens_to=of), rank=0, world_size=1))
        for of in (None, 128)
    )
    for before, batch in zip(plain, padded, strict=True):
        assert bits_of(without_token_padding(batch).replace(token_padding=None)) == bits_of(before)
        assert len(batch.features["item_id"].values()) % 128 == 0
    samples: Any = [{"item_id": [3] * (i % 7)} for i in range(20)]
    collate = JaggedCollate({"item_id": jagged(max_length=9)}, pad_tokens_to=24)
    sampler = ElasticSampler(20, batch_size=4, rank=0, world_size=1)
    for batch in ElasticLoader(DataLoader(samples, batch_sampler=sampler, collate_fn=collate)):
        assert (batch.batch_size, batch.features.length_per_key()) == (4 + 3, [24])


def _shorter(batch: Any, _: Any) -> Any:
    if isinstance(batch, SemanticIdBatch):
        return batch.retain_candidate_hierarchies(1)
    lengths = batch.features.lengths().view(len(batch.features.keys()), -1)
    kept = keyed_jagged_tensor(batch.features.keys(), batch.features.values()[:0], lengths.numpy() * 0)
    return batch.replace(features=kept, max_lengths={"item_id": 0}, length_limits={"item_id": 5})


def test_padding_keeps_the_limits_of_a_transform(small_dataset: Path) -> None:
    codes: dict[str, Any] = {"codes": CODES, "candidate_feature": True}
    config = LoaderConfig(batch_size=4, max_history_length=40, context=(), pad_tokens_to=32)
    items, coded = (
        next(iter(build_loader(small_dataset, of, rank=0, world_size=1, transform=_shorter)))
        for of in (config, dataclasses.replace(config, **codes))
    )
    assert items.features["item_id"].lengths().tolist() == [0] * 4 + [5, 5, 5, 5, 4, 4, 4]
    assert coded.features["candidate_id"].lengths().tolist() == [1] * 5
    later: SemanticIdBatch = next(
        iter(build_loader(small_dataset, dataclasses.replace(config, **codes), rank=0, world_size=1))
    )
    later = later.retain_candidate_hierarchies(1)
    assert later.features["candidate_id"].lengths().tolist() == [1] * 5
    assert later.features.length_per_key() == coded.features.length_per_key()


def test_features_that_are_lists_stay_empty_in_padding() -> None:
    tags = RandomFeature(values=Uniform(low=1, high=9), lengths=Uniform(low=0, high=3), max_length=3)
    data = RandomData(contextual={"tags": tags, "city": Uniform(low=1, high=9)})
    config = LoaderConfig(batch_size=4, pad_tokens_to=512, max_history_length=64)
    (batch,) = RandomBatches(config, data, num_batches=1, rank=0, world_size=1)
    assert batch.batch_size == 4 + 8
    assert not batch.features["tags"].lengths()[4:].any()
    assert batch.features["city"].lengths().tolist() == [1] * 12


def test_distinct_random_batches_are_padded_once() -> None:
    config = LoaderConfig(batch_size=4, pad_tokens_to=32, max_history_length=16)
    batches = list(RandomBatches(config, num_batches=5, num_distinct=2, rank=0, world_size=1))
    assert {batch.batch_size for batch in batches} == {4 + 2}
    assert {batch.features.length_per_key()[0] % 32 for batch in batches} == {0}


SHAPE: dict[str, Any] = {"embedding_dim": 6, "hidden": 8, "heads": 2, "head_dim": 4, "layers": 2, "dropout": 0.0}
HSTU = HSTUConfig(max_length=1 + 2 * 40 + 1, contextual=("user_id",), position_buckets=32, **SHAPE)
BATCHES: dict[str, LoaderConfig] = {
    "hstu": LoaderConfig(batch_size=6, max_history_length=40, max_num_candidates=1, user_id=True),
    "next item": LoaderConfig(batch_size=6, max_history_length=40),
}
WAYS: dict[str, dict[str, Any]] = {"alone": {}, "Balancer": {}}
WAYS |= {f"{way}, packed": {"pack": True, "max_tokens_per_rank": 150} for way in WAYS}
MEASURED = ("before", "after", "lower_bound", "rank_tokens", "rank_squares", "loaded_tokens", "longest", "samples")
MOVED = ("moved_samples", "tokens", "moved_tokens", "sample_bytes", "moved_bytes")


def _model(name: str, path: Path) -> nn.Module:
    sizes = read_manifest(path).vocabulary_sizes
    torch.manual_seed(0)
    if name == "next item":
        return NextItem(sizes["item_id"]).double()
    embeddings = EmbeddingCollection(tables=tables(sizes, HSTU))
    return HSTURanking(embeddings, HSTU, targets=at_least(1)).double()


def _steps(rank: int, world_size: int, path: Path, pad: int | None) -> Iterator[tuple[Any, ...]]:
    for (name, config), (way, options) in ((of, by) for of in BATCHES.items() for by in WAYS.items()):
        measured: list[StepMetrics] = []
        balance = BalanceConfig(cost=item_tokens, on_step=measured.append, **options)
        own = balance if way.startswith("alone") else None
        config = dataclasses.replace(config, pad_tokens_to=pad)
        batches: Any = build_loader(path, config, rank=rank, world_size=world_size, balance=own)
        batches = batches if own else Balancer(batches, balance)
        model = _model(name, path)
        parallel = DistributedDataParallel(model)
        for batch in batches:
            out = parallel(batch)
            loss = out.sum() if name == "next item" else out[0].sum()
            scale_loss(loss, batch).backward()
            work = batch_work(batch, interleave_actions=name == "hstu", contextual=("user_id",) * (name == "hstu"))
            counted: list[Any] = [int(work.tokens), int(work.pairs), work.predictions, batch.num_real]
            counted += [batch.loss_tokens, batch.world_loss_tokens, *batch.sample_ids[: batch.num_real].tolist()]
            metrics = measured.pop()
            of_step = {of: np.asarray(getattr(metrics, of)).tolist() for of in (*MEASURED, *MOVED)}
            of_parameters = [parameter.grad for parameter in model.parameters()]
            gradients = np.concatenate([grad.reshape(-1).numpy() for grad in of_parameters if grad is not None])
            model.zero_grad()
            shape = (batch.batch_size, *batch.features.length_per_key())
            yield (name, way), (counted, of_step), loss.item(), gradients, shape


def _run(rank: int, world_size: int, path: Path) -> list[Any]:
    return [[*_steps(rank, world_size, path, pad)] for pad in (None, 32)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_gradients_and_counts_are_those_without_padding(
    ranks: RankPool, small_dataset: Path, world_size: int
) -> None:
    for plain, padded in ranks.run(world_size, _run, small_dataset):
        shapes: dict[Any, set[Any]] = {}
        for before, after in zip(plain, padded, strict=True):
            assert before[:2] == after[:2]
            assert after[2] == pytest.approx(before[2], rel=1e-12, abs=1e-12)
            np.testing.assert_allclose(after[3], before[3], rtol=1e-9, atol=1e-12)
            shapes.setdefault(before[0], set()).add(after[4])
        of_all = {key: [step for step in plain if step[0] == key] for key in shapes}
        assert {*of_all} == {(name, way) for name in BATCHES for way in WAYS}
        for key, seen in shapes.items():
            assert len(seen) == len({max(shape[1:]) for shape in seen}) <= len(of_all[key]) / 2, (key, seen)
