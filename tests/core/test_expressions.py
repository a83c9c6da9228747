import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenrank.core.errors import ConfigError
from evenrank.core.expressions import Expression, fraction

COLUMNS = {
    "kind": np.array(["listen", "like", "listen", "skip"]),
    "ratio": np.array([50.0, np.nan, 49.0, np.nan]),
    "time": np.array([3_600, 90_000, 7_199, 0]),
}
KINDS = {"kind": "text", "ratio": "number", "time": "number"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind == 'listen'", [True, False, True, False]),
        ("kind != 'listen' or ratio >= 50", [True, True, False, True]),
        ("ratio >= 50", [True, False, False, False]),  # missing is never enough
        ("not ratio >= 50", [False, True, True, True]),
        ("kind in ('like', 'skip')", [False, True, False, True]),
        ("time not in [0, 3600]", [False, True, True, False]),
        ("3600 <= time < 7200", [True, False, True, False]),
        ("time // 3600 % 24", [1, 1, 1, 0]),
        ("1 if kind == 'listen' and ratio >= 50 else 2 if kind == 'like' else -4", [1, 2, -4, -4]),
        ("(time & 1) | 4", [4, 4, 5, 4]),
        ("(time + 1) * 2 - 1", [7201, 180001, 14399, 1]),
    ],
)
def test_an_expression_has_the_values_that_python_gives(text: str, expected: list[float]) -> None:
    expression = Expression(text)
    assert expression(COLUMNS).tolist() == expected
    assert expression.kind(KINDS) == ("condition" if isinstance(expected[0], bool) else "number")
    assert set(expression.names) == {name for name in COLUMNS if name in text}


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.integers(0, 2**63 - 1))
def test_a_fraction_is_the_hash_that_other_programs_compute(values: list[int], salt: int) -> None:
    def reference(value: int) -> float:
        word = (value + 0x9E3779B97F4A7C15 + salt) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ (word >> shift)) * factor % 2**64
        return ((word ^ (word >> 31)) >> 11) / 2**53

    found = fraction(np.array(values, dtype=np.int64), salt)
    assert found.tolist() == [reference(value) for value in values]
    assert Expression(f"fraction(user, {salt})")({"user": np.array(values, dtype=np.int64)}).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("kind ==", "'kind ==' is no expression"),
        ("__import__('os')", "is not known; use columns"),
        ("time.sum() > 1", "'time.sum()' in 'time.sum() > 1' is not known"),
        ("time // ratio", "must be divided by a number other than 0"),
        ("time % 0", "must be divided by a number other than 0"),
        ("time ** 2", "is not known"),
        ("kind is 3", "has another comparison"),
        ("time in 3", "'3' in 'time in 3' must be a tuple of numbers or of texts"),
        ("time in (1, 'a')", "must be a tuple of numbers or of texts"),
        ("time in ()", "must be a tuple of numbers or of texts"),
        ("fraction(time, 0.5)", "must be fraction(COLUMN, SALT) with an integer"),
        ("True", "'True' in 'True' is not known"),
        ("user > 1", "needs the column 'user'; there are kind, ratio, time"),
        ("kind > 1", "'1' in 'kind > 1' is a number, where a text is needed"),
        ("kind in (1, 2)", "must have texts"),
        ("time and ratio > 1", "'time' in 'time and ratio > 1' is a number, where a condition is needed"),
        ("not time", "is a number, where a condition is needed"),
        ("1 if time > 1 else 'a'", "is a text, where a number is needed"),
        ("kind + 1", "is a text, where a number is needed"),
    ],
)
def test_other_expressions_are_refused_in_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Expression(text).kind(KINDS)
    assert line in str(caught.value)
