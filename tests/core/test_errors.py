import inspect
import pickle

import pytest

from evenrank.core import errors
from evenrank.core.errors import ConfigError, DataError, EvenrankError, RankError, StateError, first_line, one_line

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, EvenrankError)]
HOSTILE = "a\r\nb\x1b[31m\u2028\u202e\x00\udcff"
ESCAPED = r"a\r\nb\x1b[31m\u2028\u202e\x00\udcff"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("disk  is\nfull"), "OSError: disk is full"),
        (KeyError(), "KeyError"),
        (ConfigError("batch_size must be at least 1, got 0"), "batch_size must be at least 1, got 0"),
    ],
)
def test_an_error_becomes_one_line_with_its_type_unless_it_is_evenranks_own(error: Exception, line: str) -> None:
    assert one_line(error) == line


def test_errors_are_caught_by_their_family_and_by_the_builtin_they_resemble() -> None:
    for kind in (ConfigError, DataError, StateError):
        assert issubclass(kind, EvenrankError)
        assert issubclass(kind, ValueError)
    assert issubclass(RankError, EvenrankError)
    assert issubclass(RankError, RuntimeError)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_one_printable_line_whatever_its_message_contains(kind: type[EvenrankError]) -> None:
    error = kind(HOSTILE)
    assert str(error) == first_line(error) == one_line(error) == ESCAPED
    assert str(kind(f"rank 1 failed: {error}")) == f"rank 1 failed: {ESCAPED}"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == ESCAPED


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
def test_errors_of_others_are_printed_as_one_line(kind: type[Exception]) -> None:
    assert first_line(kind(HOSTILE)) == "a"
    assert first_line(kind(f"\n \n{HOSTILE}")) == "a"
    assert first_line(kind("\n")) == kind.__name__
    assert one_line(kind(HOSTILE)) == kind.__name__ + r": a b\x1b[31m \u202e\x00\udcff"


def test_an_error_that_has_no_text_is_named_by_its_type() -> None:
    class WithoutTextError(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert first_line(WithoutTextError()) == one_line(WithoutTextError()) == "WithoutTextError"
