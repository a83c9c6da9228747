"""The page about semantic ids, done from its first line to its last: two days, codes, model, state."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenrank.core.errors import StateError
from evenrank.dataloader import LoaderConfig, build_loader
from tests.cli.programs import printed as evenrank
from tests.pages import blocks, commands, page

PAGE = page("how-to/models/semantic-ids.md")


def test_the_model_of_the_page_trains_on_codes_and_goes_on_with_those_of_the_next_day(here: Path) -> None:
    rng = np.random.default_rng(0)
    for day, items in ((1, 300), (2, 330)):
        rows = [f"u{event % 20},i{rng.integers(items)},{1_700_000_000 + day * 86_400 + event}" for event in range(2000)]
        (here / f"day{day}.csv").write_text("user_id,item_id,time\n" + "\n".join(rows))
        np.save(here / f"day{day}.npy", rng.normal(size=(items, 8)).astype(np.float32))
        (here / f"day{day}.ids.txt").write_text("".join(f"i{item}\n" for item in range(items)))
    _, make, next_day, append = commands(PAGE.read_text())
    log = "evenrank preprocess --dataset custom --events day1.csv --timestamp-column time --ids item=dense"
    (code,) = blocks(PAGE)
    for line in (f"{log} --item-vectors day1.npy --out out/day1", make):
        evenrank(*shlex.split(line)[1:])
    names: dict[str, Any] = {"rank": 0, "world_size": 1}
    exec(code, names)
    batch = next(iter(names["loader"]))
    losses, _ = names["model"](batch)
    losses.sum().backward()
    assert losses.shape == (4,)
    assert torch.isfinite(losses).all()
    state = names["loader"].state_dict()
    for line in (next_day, append):
        evenrank(*shlex.split(line)[1:])
    config = LoaderConfig(codes=Path("out/day2-semantic-ids"), batch_size=4)
    loader = build_loader(Path("out/day2"), config, rank=0, world_size=1)
    loader.begin_after(state)
    evenrank("semantic-ids", "out/day2", "--codes", 16, "--out", "other")
    other = build_loader(Path("out/day2"), LoaderConfig(codes="other", batch_size=4), rank=0, world_size=1)
    with pytest.raises(StateError, match="semantic_id"):
        other.begin_after(state)
