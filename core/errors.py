"""The exceptions that users see. Each message is one line: what is wrong, where, and how to fix it."""

import re

# Text of unknown origin, such as labels, names of files and messages, made safe to print.


# Control characters, which terminals obey; those that change the direction of the text around them, or are invisible
# line ends; and halves of surrogate pairs, in which Python keeps bytes of file names that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Replace each character that is not printed as itself by its escape sequence, as in `\x1b[31m`.

    Args:
        text: any text.
        keep: characters to leave as they are, such as a newline.

    """
    return _UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )


class EvenrankError(Exception):
    """Base of every error that evenrank raises on purpose; command lines print its message and exit with 2.

    Messages contain names, values and messages of others: as text, an error is one printable line whatever they are.
    """

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class ConfigError(EvenrankError, ValueError):
    """A setting or an argument is out of range or conflicts with another one."""


class DataError(EvenrankError, ValueError):
    """A file is missing, malformed, or not what its manifest says."""


class StateError(EvenrankError, ValueError):
    """A saved state does not match this dataset, these settings or this version."""


class MissingPackageError(EvenrankError, ImportError):
    """A package is not installed that an extra of evenrank has, such as Polars, of `evenrank[preprocess]`."""


class RankError(EvenrankError, RuntimeError):
    """A rank failed or ranks disagree; raised on every rank with the message of the rank that failed."""


class RankLostError(RankError):
    """A rank died, left without a word, or does not respond in time; raised on all others."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message that is not blank, or the name of its type, safe to print."""
    lines = (line.strip() for line in _message(error).splitlines())
    return escape_controls(next(filter(None, lines), type(error).__name__))


def one_line(error: BaseException) -> str:
    """Return an exception as one printable line: its message, preceded by its type unless it is evenrank's own."""
    message = escape_controls(" ".join(_message(error).split()))
    if isinstance(error, EvenrankError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of a class of others; a rank that failed here could not tell the others why it leaves
        return ""
