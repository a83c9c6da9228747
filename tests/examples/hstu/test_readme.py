"""The README's own code, run as it stands there."""

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[3] / "examples" / "hstu" / "README.md"


def test_the_first_block_trains(small_dataset: Path) -> None:
    (block, *_) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"path": small_dataset}
    exec(block, names)
    assert names["logits"].shape == (names["batch"].loss_tokens, 1)
    assert all(torch.any(parameter.grad) for parameter in names["model"].dense.encoder.layers.parameters())
