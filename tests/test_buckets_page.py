"""The page about few shapes: its code with and without padding, and the table of graphs that it has."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, build_loader
from evenrank.datasets.distributions import Lognormal, Uniform, Zipf
from tests.pages import code_of, page

PAGE = page("how-to/models/buckets.md")
COMPILE = torch.compile


class Model(nn.Module):
    """Each state is the mean of the items up to it, in a dense block."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.items, self.dense = nn.Embedding(num_items, 8), nn.Linear(8, 8)
        self.scores = nn.Linear(8, num_items)

    def encode(self, items: Tensor, offsets: Tensor) -> Tensor:
        sums = self.items(items).cumsum(0)
        before = torch.cat([sums.new_zeros(1, 8), sums])
        places = torch.arange(len(items))
        begins = offsets[torch.searchsorted(offsets, places, right=True) - 1]
        states: Tensor = self.dense((sums - before[begins]) / (places - begins + 1)[:, None]).relu()
        return states


class Graphs:
    """A backend that counts the graphs which it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.count += 1
        return module.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    made = Graphs()
    monkeypatch.setattr(torch, "compile", lambda function, **options: COMPILE(function, backend=made, **options))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=100):
        yield made
    torch._dynamo.reset()


def _on_page(model: Model) -> dict[str, Any]:
    names: dict[str, Any] = {"model": model}
    (code,) = code_of(PAGE.read_text())
    exec(code, names)
    return names


def test_the_loss_of_the_page_has_the_gradients_of_batches_without_padding(small_dataset: Path, graphs: Graphs) -> None:
    torch.manual_seed(0)
    model = Model(501).double()
    names = _on_page(model)
    found = []
    for pad in (None, 64):
        config = LoaderConfig(batch_size=8, max_history_length=50, pad_tokens_to=pad)
        before, losses = graphs.count, []
        for batch in build_loader(small_dataset, config, rank=0, world_size=1):
            loss = names["loss_sum"](batch)
            (loss / max(batch.loss_tokens, 1)).backward()
            losses.append(loss.detach())
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        found.append((graphs.count - before, losses, gradients))
    (plain, *expected), (padded, *actual) = found
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert padded <= plain / 2


def test_the_table_has_the_graphs_and_the_padding_of_an_epoch(graphs: Graphs) -> None:
    names = _on_page(Model(1000))
    rows = re.findall(r"^\| `(.*)` \| (\d+) \| (.*)% \|$", PAGE.read_text(), re.M)
    assert len(rows) >= 3
    for pad, num_graphs, share in rows:
        config = names["config"]
        config = LoaderConfig(
            batch_size=config.batch_size, max_history_length=config.max_history_length, pad_tokens_to=eval(pad)
        )
        lengths, items = Lognormal(mean=200, std=250, low=1, high=config.max_history_length), Zipf(high=999)
        data = RandomData(lengths=lengths, items=items, actions=Uniform(low=0, high=9))
        torch._dynamo.reset()
        before, real, total = graphs.count, 0, 0
        with torch.no_grad():
            for batch in RandomBatches(config, data, num_batches=40, rank=0, world_size=1):
                names["encode"](batch.features["item_id"].values(), batch.features["item_id"].offsets())
                is_real = batch.real_values("item_id")
                real, total = real + int(is_real.sum()), total + len(is_real)
        assert (graphs.count - before, f"{1 - real / total:.1%}") == (int(num_graphs), f"{share}%"), pad
