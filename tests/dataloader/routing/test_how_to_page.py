"""The code of docs/how-to/routing.md, run as it stands there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.routing import KeyMap, dist_type, remap
from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "routing.md"


def test_the_code_of_the_page_trains_and_exports_the_rows_of_the_same_keys(small_dataset: Path) -> None:
    load, own, export, _, _ = blocks(PAGE)
    names: dict[str, Any] = {"data": small_dataset, "rank": 1, "world_size": 4}
    exec(load, names)
    plain = build_loader(small_dataset, LoaderConfig(batch_size=32), rank=1, world_size=4)
    num_items, items = names["num_items"], names["items"]
    # A trained table has at each row what belongs to its key, here the key itself.
    table = torch.empty(num_items, dtype=torch.int64)
    table[items(torch.arange(num_items))] = torch.arange(num_items)
    for batch, mapped in zip(plain, names["loader"], strict=True):
        assert torch.equal(table[mapped.features["item_id"].values()], batch.features["item_id"].values())
        names["batch"] = SimpleNamespace(features=batch.features)
        exec(own, names)
        assert torch.equal(names["batch"].features.values(), mapped.features.values())
    names |= {"table": table, "nearest_rows": [5, 0, 17]}
    exec(export, names)
    assert names["by_key"].tolist() == list(range(num_items))
    assert names["keys"].tolist() == table[[5, 0, 17]].tolist()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_code_of_the_page_checks_and_remaps_checkpoints(small_dataset: Path, tmp_path: Path) -> None:
    _, _, _, check, change = blocks(PAGE)
    items = KeyMap(num_embeddings=501, world_size=4, mode="hash_roundrobin")
    plain, mapped = (LoaderConfig(batch_size=32, key_maps=key_maps) for key_maps in ({}, {"item_id": items}))
    loaders = [build_loader(small_dataset, config, rank=0, world_size=1) for config in (plain, mapped)]
    next(iter(loaders[0]))
    weight, momentum = torch.rand(501, 4), torch.rand(501)
    model = {"embeddings.sharded.embeddings.item_id.weight": weight}
    names = {
        "config": mapped,
        "model": SimpleNamespace(state_dict=lambda: model),
        "loader": loaders[1],
        "path": tmp_path / "checked",
    }
    exec(check, names)

    optimizer = {"state": {"embeddings.sharded.embeddings.item_id.weight": {"item_id.momentum1": momentum}}}
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loaders[0].state_dict()}
    save({**state, "dist_type": dist_type({})}, checkpoint_id=tmp_path / "source", no_dist=True)
    names |= {"source": tmp_path / "source", "target": tmp_path / "target", "items": items, "dist_type": dist_type}
    exec(change, names)
    (name,) = model
    loaded: dict[str, Any] = {
        "model": {name: torch.zeros_like(weight)},
        "optimizer": {"state": {name: {"item_id.momentum1": torch.zeros_like(momentum)}}},
        "loader": loaders[1].state_dict(),
        "dist_type": "",
    }
    load(loaded, checkpoint_id=tmp_path / "target", no_dist=True)
    assert loaded["dist_type"] == dist_type({"item_id": items})
    assert torch.equal(loaded["model"][name], remap(weight, None, items))
    assert torch.equal(loaded["optimizer"]["state"][name]["item_id.momentum1"], remap(momentum, None, items))
    loaders[1].load_state_dict(loaded["loader"])
    assert loaders[1].remaining_batches() == len(loaders[1]) - 1
