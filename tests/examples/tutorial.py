"""What the tutorials say that their programs print."""

import re
from itertools import groupby
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
_OUTPUT = re.compile(r'^``` \{ \.text title="Output[^"]*" \}\n(.*?)^```$', re.M | re.S)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def check_tutorial(page: str, *outputs: str) -> None:
    """Fail unless a page shows what its program prints, but for the numbers and how often a line is repeated.

    Args:
        page: the name of the tutorial, without suffix.
        outputs: of the runs that the page shows, in its order; on other data, and for fewer steps.

    """
    shown = _OUTPUT.findall((TUTORIALS / f"{page}.md").read_text())
    assert [_kinds_of_lines(block) for block in shown] == [_kinds_of_lines(output) for output in outputs], page


def _kinds_of_lines(text: str) -> list[str]:
    return [line for line, _ in groupby(_NUMBER.sub("#", line) for line in text.splitlines())]
