import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import EvenrankError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.dataloader.balance import BalanceConfig, LinearCost
from evenrank.datasets import open_store, read_manifest
from evenrank.datasets.distributions import parse_distribution
from evenrank.training import scale_loss
from scripts.error_messages import ROOT, all_messages, as_markdown, find_messages

MESSAGES = all_messages(ROOT)
PAGE = ROOT / "docs" / "reference" / "troubleshooting.md"

SOURCE = """
REMEDY = "preprocess it again"
LIMIT = 3

def check(path, values, error):
    if values.size > LIMIT:
        raise DataError(f"{path} has {len(values)} values, more than {LIMIT}; {REMEDY}")
    message = f"{path}: `{values.name}` cannot be read"
    if values:
        raise DataError(message) from error
    raise KeyError("not an error of the package")

def made(path):
    return ConfigError(f"{path} is " "empty, " + "give another")
"""


def test_messages_are_found_wherever_an_error_is_made() -> None:
    found = list(find_messages(ast.parse(SOURCE), "a.py", {}))
    assert [(message.error, message.path, message.text) for message in found] == [
        ("DataError", "a.py", "{path} has … values, more than 3; preprocess it again"),
        ("DataError", "a.py", "{path}: `{name}` cannot be read"),
        ("ConfigError", "a.py", "{path} is empty, give another"),
    ]
    text = as_markdown(found[:2])
    assert "\n`a.py`\n\n- `{path} has … values, more than 3; preprocess it again`\n" in text
    assert "\n- `` {path}: `{name}` cannot be read ``\n" in text


def _pattern(text: str) -> str:
    """Return a regular expression of the messages that a listed one stands for."""
    return ".*".join(re.escape(part) for part in re.split(r"\{\w*\}|…", text))


@pytest.mark.parametrize(
    "fail",
    [
        lambda path: _balanced(path, window=0),
        lambda path: LoaderConfig(batch_size=0),
        lambda path: read_manifest(path / "missing"),
        lambda path: open_store(path, "test"),
        lambda path: parse_distribution("zipf:size=3"),
        lambda path: _with_a_state_of_other_data(path),
        lambda path: scale_loss(1.0, None),  # type: ignore[arg-type]
    ],
)
def test_an_error_that_is_raised_is_listed(small_dataset: Path, fail: Callable[[Path], Any]) -> None:
    with pytest.raises(EvenrankError) as raised:
        fail(small_dataset)
    name = type(raised.value).__name__
    assert [
        message
        for message in MESSAGES
        if message.error == name and re.fullmatch(_pattern(message.text), str(raised.value))
    ]


def _balanced(path: Path, **options: Any) -> None:
    balance = BalanceConfig(cost=LinearCost(interleave_actions=False), **options)
    build_loader(path, LoaderConfig(batch_size=8), rank=0, world_size=1, balance=balance)


def _with_a_state_of_other_data(path: Path) -> None:
    loaders = [
        build_loader(path, LoaderConfig(batch_size=8, split=split), rank=0, world_size=1) for split in ("train", "eval")
    ]
    loaders[0].load_state_dict(loaders[1].state_dict())


def test_the_page_explains_messages_that_exist() -> None:
    sections = re.findall(r"^### (.*)\n\n`(.*)`$", PAGE.read_text(), re.M)
    assert len(sections) >= 10
    parts = [part for message in MESSAGES for part in re.split(r"\{\w*\}|…", message.text) if len(part) >= 8]
    unknown = [heading for heading, example in sections if not any(part in example for part in parts)]
    # PyTorch's own, and one that is made of several pieces.
    assert unknown == ["Watchdog caught collective operation timeout", "the loss of rank 1 is NaN"]
