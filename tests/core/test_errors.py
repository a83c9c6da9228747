import inspect
import pickle
import sys
import unicodedata

import pytest

from evenrank.core import errors
from evenrank.core.errors import ConfigError, EvenrankError, RankError, escape_controls, first_line, one_line

HOSTILE = "a\r\nb\x1b[31m\u2028\u202e\x00\udcff"
ESCAPED = r"a\r\nb\x1b[31m\u2028\u202e\x00\udcff"
RESEMBLED = {ConfigError: ValueError, RankError: RuntimeError, errors.MissingPackageError: ImportError}


def test_an_error_is_one_printable_line_whatever_its_message_contains() -> None:
    for _, kind in inspect.getmembers(errors, lambda each: inspect.isclass(each) and issubclass(each, EvenrankError)):
        error = kind(HOSTILE)
        assert str(error) == first_line(error) == one_line(error) == ESCAPED
        assert str(kind(f"rank 1 failed: {error}")) == f"rank 1 failed: {ESCAPED}"
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (kind, ESCAPED)
        assert issubclass(kind, RESEMBLED.get(kind, Exception))


class _WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "first", "line"),
    [
        (OSError("disk  is\nfull"), "disk  is", "OSError: disk is full"),
        (ValueError(f"\n \n{HOSTILE}"), "a", r"ValueError: a b\x1b[31m \u202e\x00\udcff"),
        (KeyError(), "KeyError", "KeyError"),
        (_WithoutTextError(), "_WithoutTextError", "_WithoutTextError"),
    ],
)
def test_an_error_of_others_becomes_one_line_with_its_type(error: Exception, first: str, line: str) -> None:
    assert (first_line(error), one_line(error)) == (first, line)


def test_controls_are_escaped_and_other_text_is_kept() -> None:
    for text in ("", "Zoë [/x] $\\frac{", "日本語", "👩\u200d🔬", "a\\x1b"):
        assert escape_controls(text) == text
    assert escape_controls("a\nb\tc", keep="\n") == "a\nb\\tc"
    escaped = escape_controls("".join(map(chr, range(sys.maxunicode + 1))))
    assert not set(map(unicodedata.category, escaped)) & {"Cc", "Cs", "Zl", "Zp"}
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not set(map(unicodedata.bidirectional, escaped)) & directions
    escaped.encode()
