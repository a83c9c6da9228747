"""The code of docs/how-to/negatives.md, run as it stands there."""

from pathlib import Path
from typing import Any

import torch

from evenrank.dataloader import LoaderConfig, Negatives, build_loader
from evenrank.training import RankingMetrics, in_batch_mask, scale_loss
from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "negatives.md"


def test_the_losses_of_the_page_are_those_of_plain_formulas(small_dataset: Path) -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(501, 8)
    rank = {"data": small_dataset, "rank": 0, "world_size": 1}
    names: dict[str, Any] = {"torch": torch, "embedding": embedding, "scale_loss": scale_loss, **rank}
    names |= {each.__name__: each for each in (LoaderConfig, Negatives, RankingMetrics, build_loader, in_batch_mask)}

    def encode(items: Any) -> torch.Tensor:
        history = [row[:-1] for row in items.values().split(items.lengths().tolist())]
        return torch.stack([embedding(row).sum(dim=0) for row in history])

    names["encode"] = encode
    settings, sampled, in_batch, evaluation = blocks(PAGE)
    for code in (settings, sampled):
        exec(code, names)
    batch, expected = names["batch"], torch.zeros(())
    items, users = batch.features["item_id"], encode(batch.features["item_id"])
    for row, ids in enumerate(items.values().split(items.lengths().tolist())[: batch.num_real]):
        drawn = batch.negatives["item_id"].values()[64 * row : 64 * row + 64]
        log_q = torch.cat(
            [batch.log_q[key].values()[n * row : n * row + n] for key, n in (("positive", 1), ("negative", 64))]
        )
        scores = embedding(torch.cat([ids[-1:], drawn])) @ users[row] - log_q
        expected = expected - scores.log_softmax(dim=0)[0]
    assert batch.num_real < batch.batch_size
    torch.testing.assert_close(names["loss_sum"], expected, rtol=1e-4, atol=1e-3)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.isfinite().all()

    exec(in_batch, names)
    assert names["loss_sum"].isfinite()
    assert (names["scores"] == -torch.inf).any()

    recalls = []
    for _ in range(2):
        exec(evaluation, names)
        recalls.append(names["recall"])
    drawn = [[batch.negatives["item_id"].values().tolist() for batch in names["eval_loader"]] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert 0 < recalls[0] == recalls[1] < 1
