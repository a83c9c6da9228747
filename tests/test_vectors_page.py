"""The page about vectors, done from its first line to its last: files, dataset, model."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenrank.dataloader import LoaderConfig, build_loader
from tests.cli.programs import printed as evenrank
from tests.pages import blocks, commands, page
from tests.preprocess.decoded import read_vocabulary

PAGE = page("how-to/models/vectors.md")


def test_the_model_of_the_page_gets_the_vectors_that_were_saved(here: Path) -> None:
    rows = "".join(f"u{event % 7},i{event % 11},{1_700_000_000 + event}\n" for event in range(90))
    (here / "log.csv").write_text("user_id,item_id,time\n" + rows)
    vectors = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float16)
    names: dict[str, Any] = {"vectors": vectors, "ids": [f"i{item}" for item in range(8)] + ["unseen"]}
    files, model = blocks(PAGE)
    exec(files, names)
    (line,) = commands(PAGE.read_text())
    report = evenrank(*shlex.split(line)[1:])
    assert "items with a vector but no id (left out): 1\nitems without a vector: 3\n" in report
    exec(model, names)
    encoder = names["ItemEncoder"](here / "out", 3, "cpu")
    with torch.no_grad():
        torch.nn.init.eye_(encoder.project.weight)
        encoder.project.bias.zero_()
    by_raw_id = dict(zip(names["ids"], vectors[:, :3].tolist(), strict=True))
    raw_ids, num_tokens = read_vocabulary(here / "out", "item_id"), 0
    for batch in build_loader(here / "out", LoaderConfig(batch_size=4), rank=0, world_size=1):
        ids = batch.features["item_id"].values().tolist()
        num_tokens += len(ids)
        assert encoder(batch).tolist() == [by_raw_id.get(raw_ids[item], [0, 0, 0]) for item in ids]
    assert num_tokens == 90 - 7  # without the last ones
