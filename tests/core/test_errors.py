import pytest

from evenrank.core.errors import ConfigError, DataError, EvenrankError, RankError, StateError, one_line


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
