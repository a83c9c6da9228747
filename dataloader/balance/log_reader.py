"""The lines of a log of balancing metrics: reading one, and recognizing one that was not written to its end."""

import dataclasses
import json
import re
from typing import Any

import numpy as np

from evenrank.dataloader.balance.metrics import LogRecord, log_key

_LARGEST = 1 << 63  # loads are int64, and no other number of a record is larger; sums of these do not overflow float64
_FIRST = ("epoch", "step", "seen")  # the order in which LogRecord.to_json writes the fields
_FIELDS = sorted(dataclasses.fields(LogRecord), key=lambda entry: (*_FIRST, entry.name).index(entry.name))
_INCOMPLETE_VALUE = re.compile(rb"(?:[-+.0-9eE]*|\[[0-9, ]*\]?)(?:, ?)?")


def parse_record(line: bytes) -> LogRecord:
    """Parse a line of a log. Unknown fields are ignored.

    Raises:
        ValueError: the line is not a record; the message says why.

    """
    entry = _parse_object(line)
    values = {field.name: _value(entry, field) for field in _FIELDS}
    if values["steps"] < 1:
        raise ValueError("'steps' is below 1")
    if len(values["before"]) != len(values["after"]):
        raise ValueError("'before' and 'after' differ in length")
    return LogRecord(**values)


def is_beginning_of_record(text: bytes) -> bool:
    """Return whether a line that `LogRecord.to_json` gives begins with `text`, which lacks at least the last `}`."""
    complete, separator, last = text.rpartition(b', "')
    keys = [log_key(field) for field in _FIELDS]
    num_complete = 0
    if separator:
        try:
            entry = _parse_object(complete + b"}")
            num_complete = len(entry)
            if list(entry) != keys[:num_complete] or num_complete == len(keys):
                return False
            for field in _FIELDS[:num_complete]:
                _value(entry, field)
        except ValueError:
            return False
    rest = separator + last
    expected = f'{", " if separator else "{"}"{keys[num_complete]}": '.encode()
    if len(rest) <= len(expected):
        return expected.startswith(rest)
    return rest.startswith(expected) and _INCOMPLETE_VALUE.fullmatch(rest, len(expected)) is not None


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # json would call every line "line 1"
        raise ValueError("it is not JSON") from error
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    return entry


def _value(entry: dict[str, Any], field: "dataclasses.Field[Any]") -> Any:
    key = log_key(field)
    if key not in entry:
        raise ValueError(f"{key!r} is missing")
    value = entry[key]
    if field.type is int:
        is_valid = _is_count(value)
    elif field.type is float:
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST
        value = float(value) if is_valid else value
    else:
        is_valid = isinstance(value, list) and len(value) > 0 and all(_is_count(load) for load in value)
        value = np.array(value, dtype=np.int64) if is_valid else value
    if not is_valid:
        raise ValueError(f"{key!r} is {json.dumps(value)[:40]}")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST
