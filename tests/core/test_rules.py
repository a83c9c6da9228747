import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from evenrank.core.rules import (
    Bounds,
    Count,
    NonNegative,
    Valid,
    converted,
    declared_rules,
    fault_finder,
    without_rules,
)

TWO, ONE = Valid(lambda value: len(value) == 2, "two of them"), Bounds(at_least=1)
POSITIVE = Bounds(above=0)


@pytest.mark.parametrize(
    ("kind", "value", "fault"),
    [
        (int, True, (None, True, "")),
        (float, np.float64(3), None),
        (Literal[1, "a"], "a", None),
        (Literal[1, "a"], True, (None, True, "")),
        (Count | None, None, None),
        (Count | None, 0, (ONE, 0, "")),
        (Annotated[Count | None, TWO], None, None),
        (tuple[Count, ...], (1, 0), (ONE, 0, "")),
        (tuple[Count, str], (1, 1), (None, 1, "")),
        (tuple[int, int], (1, 2, 3), (None, (1, 2, 3), "")),
        (Sequence[Count], [2, 1], None),
        (Annotated[Sequence[NonNegative], TWO], [0], (TWO, [0], "")),
        (Mapping[str, Count], {"a": 1, "b": 0}, (ONE, 0, "['b']")),
        (Mapping[str, Count], {1: 1}, (None, 1, "[1]")),
        (Annotated[float, POSITIVE], math.nan, (POSITIVE, math.nan, "")),
    ],
)
def test_a_fault_is_the_rule_that_is_broken_with_the_part_that_breaks_it(kind: Any, value: Any, fault: Any) -> None:
    assert fault_finder(kind)(value) == fault


def test_rules_are_found_in_all_parts_of_a_type_and_values_of_files_get_its_type() -> None:
    kind = Annotated[Mapping[str, tuple[Count, ...]] | None, TWO]
    assert (list(declared_rules(kind)), without_rules(kind)) == ([TWO, ONE], Mapping[str, tuple[int, ...]] | None)
    assert converted([1, 0], tuple[Count, ...]) == (1, 0)  # which is checked later
    assert converted(["a"], tuple[int, ...]) == ["a"]
    assert converted([1], Sequence[int]) == [1]
    assert (converted(1.5, timedelta), converted("x", timedelta)) == (timedelta(seconds=1.5), "x")
