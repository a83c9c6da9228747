"""Readers of CSV files that do the obvious, byte by byte, to compare others with."""

import re
from collections.abc import Iterator

MAX_TIMESTAMP_MS = 253_402_300_799_999


def read_lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line after the header."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        yield number, line.rstrip(b"\r").decode(errors="replace")


def quoted_fields(line: str, separator: str) -> list[str] | None:
    """Return the fields of a line, or None if it is empty, contains a NUL byte, or a quoted field does not end well."""
    if not line or "\0" in line:
        return None
    fields, position = [], 0
    while True:
        value = ""
        if line[position : position + 1] == '"':
            position += 1
            while True:
                end = line.find('"', position)
                if end < 0:
                    return None
                value += line[position:end]
                position = end + 1
                if line[position : position + 1] != '"':
                    break
                value += '"'
                position += 1
            if position < len(line) and line[position] != separator:
                return None
        else:
            while position < len(line) and line[position] != separator:
                value += line[position]
                position += 1
        fields.append(value)
        if position == len(line):
            return fields
        position += 1


def movielens_row(line: str, separator: str, ratings_per_star: int) -> tuple[int, int, int, int] | None:
    """Return user, item, action and time of a line of ratings, or None if it is bad."""
    fields = line.split(separator)
    if len(fields) != 4 or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", fields[2], re.ASCII):
        return None
    user, movie, time = (_int64(fields[index]) for index in (0, 1, 3))
    step = float(fields[2]) * ratings_per_star
    if user is None or movie is None or time is None or movie < 0 or not 0 <= time <= MAX_TIMESTAMP_MS // 1000:
        return None
    return (user, movie, int(step) - 1, time * 1000) if step in range(1, 5 * ratings_per_star + 1) else None


def kuairand_row(line: str) -> tuple[int, ...] | None:
    """Return user, item, action, time and the two durations of a line of a log, or None if it is bad."""
    fields = line.split(",")
    if "\0" in line or len(fields) != 19:
        return None
    numbers = [_int64(fields[index]) for index in (0, 1, 4, 12, 13, 18)]
    flags = [_int64(fields[index]) for index in (*range(5, 12), 16)]
    user, video, time, play, duration, _ = (-1 if number is None else number for number in numbers)
    if None in numbers or video < 0 or not 0 <= time <= MAX_TIMESTAMP_MS or not all(flag in (0, 1) for flag in flags):
        return None
    action = sum(1 << bit for bit, flag in enumerate(flags) if flag)
    return user, video, action, time, play, duration


def _int64(text: str) -> int | None:
    if not re.fullmatch("[+-]?[0-9]+", text):
        return None
    number = int(text)
    return number if -(2**63) <= number < 2**63 else None
