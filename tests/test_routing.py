"""The code of docs/routing.md, run as it stands there."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from evenrank.dataloader import LoaderConfig, build_loader

PAGE = Path(__file__).resolve().parent.parent / "docs" / "routing.md"


def _code() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def test_the_code_of_the_page_trains_and_exports_the_rows_of_the_same_keys(small_dataset: Path) -> None:
    load, own, export, *_, by_key = _code()
    names: dict[str, Any] = {"data": small_dataset, "rank": 1, "world_size": 4}
    exec(load, names)
    plain = build_loader(small_dataset, LoaderConfig(batch_size=32), rank=1, world_size=4)
    pairs = list(zip(plain, names["loader"], strict=True))
    assert len(pairs) == 2
    num_items, items = names["num_items"], names["items"]

    # A trained table has at each row what belongs to its key, here the key itself.
    table = torch.empty(num_items, dtype=torch.int64)
    table[items(torch.arange(num_items))] = torch.arange(num_items)
    for batch, mapped in pairs:
        assert torch.equal(table[mapped.features["item_id"].values()], batch.features["item_id"].values())

        names["batch"] = SimpleNamespace(features=batch.features)
        exec(own, names)
        assert torch.equal(names["batch"].features.values(), mapped.features.values())

    plain_features = pairs[0][0].features
    names["batch"] = SimpleNamespace(features=plain_features)
    exec(by_key, names)
    assert names["bucketized"].values()[names["permutation"]].tolist() == plain_features.values().tolist()
    of_rank = torch.bincount(names["owners"], minlength=4)
    assert of_rank.tolist() == names["bucketized"].lengths().view(4, -1).sum(dim=1).tolist()

    names |= {"table": table, "nearest_rows": [5, 0, 17]}
    exec(export, names)
    assert names["by_key"].tolist() == list(range(num_items))
    assert names["keys"].tolist() == table[[5, 0, 17]].tolist()
