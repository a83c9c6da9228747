"""The page "Does this fit my model?": its code on a batch of a loader, next to attention over each sample alone."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from evenrank.cli.options import BATCH_SIZE, MIN_STEPS, CostOptions, make_cost
from evenrank.cli.reports.gains import Gain
from evenrank.cli.reports.simulation import open_source, simulate
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, SelfAttentionCost, StepMetrics, summarize
from evenrank.datasets.schema import MAX_HISTORY_LENGTH
from tests.pages import ROOT, blocks

FITS = ROOT / "docs" / "explanation" / "fits-my-model.md"
HEADS, HEAD_DIM, MAX_LENGTH = 2, 8, 60


def test_the_table_is_that_of_simulate() -> None:
    text = FITS.read_text()
    ((source, ranks),) = re.findall(r"\| `evenrank simulate (\S+) --ranks (\d+)`", text)
    rows = re.findall(r"^\| `--cost (\S+)(?: --window (\d+))?` \| (\S+) \| (\S+) \| (\S+) \|$", text, re.M)
    assert len(rows) == 4
    for cost, window, *shown in rows:
        balance = BalanceConfig(cost=make_cost(CostOptions(cost=cost)), window=int(window or 1))
        lengths = open_source(source, "train", MAX_HISTORY_LENGTH)
        steps = simulate(lengths, balance, int(ranks), batch_size=BATCH_SIZE, steps=MIN_STEPS)
        summary = Gain(int(ranks), balance.strategy, steps).summary
        assert shown == [f"{summary.idle_before:.1%}", f"{summary.idle_after:.1%}", f"{summary.speedup:.2f}x"]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of one sample: [heads, tokens, head_dim]


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def _hstu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = functional.silu(query @ key.transpose(1, 2) / HEAD_DIM**0.5).tril() / 512
    return weights @ value


@pytest.fixture
def names(small_dataset: Path) -> dict[str, Any]:
    """Return the names that the page's pieces of code refer to, and what they are of."""
    torch.manual_seed(0)
    config = LoaderConfig(batch_size=50)
    *_, batch = build_loader(small_dataset, config, rank=0, world_size=1)
    assert 1 < batch.num_real < batch.batch_size  # rows of padding too
    width = HEADS * HEAD_DIM
    embedding = torch.nn.Embedding(100_000, width)
    projections = [torch.nn.Linear(width, width) for _ in range(3)]
    for module in (embedding, *projections):
        module.requires_grad_(requires_grad=False)  # on the CPU FlexAttention has no backward pass
    names: dict[str, Any] = {
        "batch": batch,
        "embedding": embedding,
        "projections": projections,
        "torch": torch,
        "F": functional,
    }
    exec(blocks(FITS)[0], names)
    events = embedding(names["k"].values())
    names |= zip(
        ("query", "key", "value"), (x(events).unflatten(-1, (HEADS, HEAD_DIM)) for x in projections), strict=True
    )
    names |= {each.__name__: each for each in (BalanceConfig, build_loader)}  # of a section before
    return names | {
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "max_length": MAX_LENGTH,
        "config": config,
        "path": small_dataset,
    }


def _alone(names: dict[str, Any], attend: Attend) -> list[Tensor]:
    """Return attention over each row alone: [tokens of the row, heads, head_dim] each."""
    lengths = names["k"].lengths().tolist()
    rows = zip(*(names[name].split(lengths) for name in ("query", "key", "value")), strict=True)
    return [attend(*(x.transpose(0, 1) for x in row)).transpose(0, 1) for row in rows]


def _code(section: str) -> list[str]:
    text = FITS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.S)


@pytest.mark.parametrize(
    ("section", "attend"),
    [
        ("Jagged kernels", _hstu),
        ("Nested tensors", _full),
        ("FlexAttention", _causal),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:flex_attention called without")
def test_jagged_attention_is_that_of_each_sample(names: dict[str, Any], section: str, attend: Attend) -> None:
    expected = torch.cat(_alone(names, attend))
    (code,) = _code(section)
    exec(code, names)
    torch.testing.assert_close(names["attended"], expected)


def test_offsets_are_what_variable_length_attention_asks_for(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen_attn(  # in the place of PyTorch's, which needs a GPU
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        **options: Any,
    ) -> Tensor:
        assert cu_seq_q is cu_seq_k
        assert cu_seq_q.dtype == torch.int32
        assert max_q == max_k >= int(cu_seq_q.diff().max())
        assert options == {"window_size": (-1, 0)}  # causal
        spans = zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)
        rows = ([x[start:stop].transpose(0, 1) for x in (query, key, value)] for start, stop in spans)
        return torch.cat([_causal(*row).transpose(0, 1) for row in rows])

    expected = torch.cat(_alone(names, _causal))
    attention, _ = _code("Packed")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    exec(attention, names)
    torch.testing.assert_close(names["attended"], expected)


def test_padded_attention_is_that_of_each_sample(names: dict[str, Any]) -> None:
    expected = _alone(names, _causal)[: names["batch"].num_real]
    attention, _ = _code("Padded")
    exec(attention, names)
    padded = names["attended"].transpose(1, 2)
    assert padded.shape[:2] == (len(expected), max(map(len, expected)))
    for row, alone in zip(padded, expected, strict=True):
        torch.testing.assert_close(row[: len(alone)], alone)


def _epoch(code: str, names: dict[str, Any]) -> tuple[list[list[int]], list[StepMetrics]]:
    """Return the lengths in each batch of the loader that the code makes, and the metrics of its steps."""
    steps: list[StepMetrics] = []

    def observed(**options: Any) -> BalanceConfig:
        return BalanceConfig(**options, on_step=steps.append)

    config, cost = (
        LoaderConfig(batch_size=4),
        SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=4),
    )
    names = names | {"BalanceConfig": observed, "config": config, "cost": cost, "rank": 0, "world_size": 2}
    exec(code, names)
    return [batch.features["item_id"].lengths()[: batch.num_real].tolist() for batch in names["loader"]], steps


def test_packed_steps_are_full(names: dict[str, Any]) -> None:
    _, code = _code("Packed")
    batches, _ = _epoch(code.replace("8192", "64"), names)
    assert len({len(lengths) for lengths in batches}) > 1
    assert max(map(sum, batches)) <= 64


def test_windows_bring_histories_of_similar_length_together(names: dict[str, Any]) -> None:
    _, code = _code("Padded")
    batches, steps = _epoch(code, names)
    alone, unchanged = _epoch(code.replace("window=8", "window=1"), names)
    tokens, without = (sum(len(lengths) * max(lengths) for lengths in epoch) for epoch in (batches, alone))
    assert tokens < 0.8 * without
    assert summarize(steps).speedup > 1.25
    assert summarize(unchanged).speedup == 1.0
