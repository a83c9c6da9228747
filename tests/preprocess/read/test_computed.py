"""Expressions on columns of Polars give what they give on arrays of NumPy."""

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.expressions import Expression
from evenrank.preprocess.read.computed import _Columns

_EXPRESSIONS = (
    "a + b * 3 - -a",
    "a // 3 + b // 2",
    "a % 3 + b % 4",
    "x // 0.5 + x % 1.5",
    "(a & 6) + (b | 9)",
    "a if x >= 0 else b if text == 'like' else 7",
    "x if not 'listen' == text else 0.25",
    "1 if -2 < a <= b != 3 else 0",
    "1 if a in (1, 2, -3) and b not in (0, 2.0) or x in (0.5, 1, 2) else 0",
    "1 if text in ('like', 'skip') or not (text != 'x' and a == b) else 0",
    "fraction(a, 3) + fraction(b, 0)",
    "5",
    "text != 'like'",
)


@pytest.mark.parametrize("text", _EXPRESSIONS)
@given(st.data())
def test_expressions_of_polars_are_those_of_numpy(text: str, data: Any) -> None:
    row = st.tuples(
        *[st.integers(-9, 9)] * 2,
        st.sampled_from([-2.0, -0.75, 0.0, 0.5, 1.0, 3.25]),
        st.sampled_from(["like", "listen", "x"]),
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=20))
    columns = {
        name: np.array(values) for name, values in zip(("a", "b", "x", "text"), zip(*rows, strict=True), strict=True)
    }
    expression = Expression(text)
    frame = pl.DataFrame({name: values.tolist() for name, values in columns.items()})
    value = expression({name: pl.col(name) for name in columns}, _Columns())
    found = frame.with_columns((value if isinstance(value, pl.Expr) else pl.lit(value)).alias("value"))["value"]
    expected = np.broadcast_to(expression(columns), len(rows))
    assert found.to_list() == expected.tolist()


def test_comparisons_with_a_missing_value_are_false_but_for_not_equal_and_not_in() -> None:
    frame = pl.DataFrame({"a": pl.Series([None, 5], dtype=pl.Int64), "t": [None, "x"]})
    for text, expected in {
        "a >= 5": [False, True],
        "a == 5": [False, True],
        "not a >= 5": [True, False],
        "a != 5": [True, False],
        "a in (5,)": [False, True],
        "a not in (5,)": [True, False],
        "t != 'x'": [True, False],
        "0 < a != 4": [False, True],
        "a == a": [False, True],
    }.items():
        value = Expression(text)({name: pl.col(name) for name in frame.columns}, _Columns())
        assert frame.select(value=value)["value"].to_list() == expected, text
    salted = Expression("fraction(a, 1)")({"a": pl.col("a")}, _Columns())
    assert frame.select(value=salted)["value"].is_null().to_list() == [True, False]
