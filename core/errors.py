"""The exceptions that users see: one printable line each, with the fault, its place and the remedy."""

import re

# Characters that must not reach a terminal: control characters, those that change the direction of text, invisible line
# ends, and surrogates, in which Python keeps the bytes of file names that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


# `key:secret@` of a URL, but no port, and nothing else that comes before an @ in a path.
_CREDENTIALS = re.compile(r"(\b[A-Za-z][\w+.-]+:/{1,3})[^\s/?@]*:(?!\d+/)\S*@")
# A URL of an object store, perhaps with one slash less, as a `Path`, and with options, among which can be keys.
_STORED = re.compile(r"\b(s3|gs|gcs|abfss?|hdfs|viewfs):/{1,2}(?=[^\s/])([^\s?'\"]*)(?:\?[^\s'\";,]+)?", re.IGNORECASE)


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Replace unprintable characters, except those in `keep`, by their escape sequences, such as `\x1b`.

    URLs of object stores are shown without credentials and options.
    """
    if ":/" in text:
        text = _STORED.sub(r"\1://\2", _CREDENTIALS.sub(r"\1", text))
    return _UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )


class EvenrankError(Exception):
    """Base of every error that evenrank raises on purpose; commands print its message and exit with status 2."""

    def __str__(self) -> str:  # messages quote labels, file names and the errors of other libraries
        return escape_controls(super().__str__())


class ConfigError(EvenrankError, ValueError):
    """An option or argument is out of range or conflicts with another one."""


class DataError(EvenrankError, ValueError):
    """A file is missing, malformed, or differs from its manifest."""


class StateError(EvenrankError, ValueError):
    """A saved state does not match this dataset, these settings or this version."""


class MissingPackageError(EvenrankError, ImportError):
    """A package from an extra of evenrank is not installed, such as Polars from `evenrank[preprocess]`."""


class RankError(EvenrankError, RuntimeError):
    """A rank failed or ranks disagree; raised on every rank with the message of the rank that failed."""


class RankLostError(RankError):
    """A rank died or does not respond in time; raised on all others."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message that is not blank, or the name of its type, printable."""
    lines = (line.strip() for line in _message(error).splitlines())
    return escape_controls(next(filter(None, lines), type(error).__name__))


def one_line(error: BaseException) -> str:
    """Return an exception as one printable line: its message, preceded by its type unless it is evenrank's own.

    Of the error of a collective of torch.distributed.checkpoint, it is that of the first rank which failed.
    """
    if failures := getattr(error, "failures", None):  # of a CheckpointException, which has no message
        rank, (cause, _) = min(failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {one_line(cause)}"
    message = escape_controls(" ".join(_message(error).split()))
    if isinstance(error, EvenrankError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a faulty __str__ must not keep a rank from reporting its error to the others
        return ""
