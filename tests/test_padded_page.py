"""The page "From padded to jagged": its code in its order, on a batch of a loader, next to each sample alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence
from torchrec.sparse.jagged_tensor import JaggedTensor

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, LinearCost
from evenrank.training import scale_loss
from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "padded-to-jagged.md"
WIDTH, NUM_ITEMS = 8, 501


@pytest.fixture
def names(small_dataset: Path) -> dict[str, Any]:
    """Return the names of the page after its code has run."""
    torch.manual_seed(0)
    config = LoaderConfig(batch_size=50, max_history_length=60)
    balance = BalanceConfig(cost=LinearCost(interleave_actions=False))
    *_, batch = build_loader(small_dataset, config, rank=0, world_size=1, balance=balance)
    assert 1 < batch.num_real < batch.batch_size  # rows of padding too
    names: dict[str, Any] = {"batch": batch, "torch": torch, "F": functional, "scale_loss": scale_loss}
    names["JaggedTensor"] = JaggedTensor
    names |= {"embedding": nn.Embedding(NUM_ITEMS, WIDTH), "positions": nn.Embedding(60, WIDTH)}
    names |= {"mlp": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), "scores": nn.Linear(WIDTH, NUM_ITEMS)}
    names |= {name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")}
    for code in blocks(PAGE):
        exec(code, names)
    return names


def _samples(names: dict[str, Any], values: Any) -> list[Any]:
    return list(values.split(names["lengths"].tolist()))


def test_the_code_of_the_page_is_that_of_each_sample(names: dict[str, Any]) -> None:
    lengths, x, batch = names["lengths"].tolist(), names["x"], names["batch"]
    assert names["row"].tolist() == [row for row, length in enumerate(lengths) for _ in range(length)]
    assert names["position"].tolist() == [position for length in lengths for position in range(length)]

    torch.testing.assert_close(names["same"], x)
    assert names["padded"].shape == (len(lengths), max(lengths), WIDTH)
    longest = names["longest"]
    assert longest == max(lengths)
    ids = names["history"].to_padded_dense(longest)
    for row, sample in enumerate(_samples(names, names["items"])):
        assert ids[row].tolist() == sample.tolist() + [0] * (longest - len(sample))

    def causal(sample: Any) -> Any:
        scores = names["query"](sample) @ names["key"](sample).T / WIDTH**0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
        return scores.masked_fill(hidden, -torch.inf).softmax(1) @ names["value"](sample)

    torch.testing.assert_close(names["attended"], torch.cat([causal(sample) for sample in _samples(names, x)]))
    for row, sample in enumerate(_samples(names, x)[: batch.num_real]):
        torch.testing.assert_close(names["mean"][row], sample.mean(0))
        torch.testing.assert_close(names["last"][row], sample[-1])

    pairs = [(ids[:-1], ids[1:]) for ids in (sample.tolist() for sample in _samples(names, names["items"]))]
    assert names["labels"].tolist() == [label for _, labels in pairs for label in labels]
    assert names["items"][names["has_next"]].tolist() == [item for items, _ in pairs for item in items]
    assert len(names["labels"]) == batch.loss_tokens
    torch.testing.assert_close(names["loss"], names["loss_sum"] / batch.loss_tokens)
    names["loss"].backward()
    assert names["embedding"].weight.grad.isfinite().all()


def test_recurrent_layers_take_the_rows_that_are_not_empty(names: dict[str, Any]) -> None:
    (code,) = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| GRU")]
    samples = _samples(names, names["x"])[: names["batch"].num_real]
    rows = {"x": torch.cat(samples), "lengths": names["lengths"][: len(samples)], "pack_sequence": pack_sequence}
    gru = nn.GRU(WIDTH, WIDTH)
    _, last = gru(eval(code, rows))
    for state, sample in zip(last[0], samples, strict=True):
        torch.testing.assert_close(state, gru(sample)[1][0])
