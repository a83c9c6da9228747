"""Random malformed text against plain parsers: which lines are rows, and with which values."""

import bz2
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from evenrank.preprocess.read import text as text_files
from evenrank.preprocess.read.table import FAULT, Table
from evenrank.preprocess.read.tabular import open_table

NASTY = [b"\0", b"\r", b"\n", b"\r\n", b'"', b'""', b",", b":", b"::", b"\t", b" ", b"\xef\xbb\xbf", b"\xff", b"\xc3"]
NASTY += ["é".encode(), "\u2028".encode(), "\x85".encode(), b"\f", b"\v", b"\x1c", b"\x1f\x8b", b"-", b"+", b".", b"'"]
NASTY += [b"0", b"1", b"1e0", b"9" * 19, b'"a""b"', b'\n"', b'"\n', b'a\0"', b"\\", b"#", b"\x1b", b"null", b"NaN"]


def _malformed(rng: random.Random, header: bytes, good: list[bytes]) -> bytes:
    """Return a file with a header, whose lines are good ones with nasty bytes in random places."""
    lines = []
    is_clean = rng.random() < 0.3  # so that some files are read quickly from end to end
    longer = rng.choice(good) + rng.choice([b",", b"\t", b":", b"::", b"::9", b",,9"])
    good = [*good, *good, longer, b"\xef\xbb\xbf" + rng.choice(good)]
    for line in rng.choices(good, k=rng.randrange(1, 8)):
        for _ in range(0 if is_clean or rng.random() < 0.5 else rng.randrange(1, 4)):
            begin = rng.randrange(len(line) + 1)
            line = line[:begin] + rng.choice(NASTY) + line[begin + rng.choice([0, 0, 1, 3]) :]
        lines.append(line)
    line_end = rng.choice([b"\n", b"\n", b"\r\n", b"\r\r\n"])
    body = line_end.join(lines) + rng.choice([line_end, line_end, b"", b"\r"])
    if rng.random() < 0.005:
        body = (body + b"\n") * 2000  # large enough for Polars to read it in parallel
    return rng.choice([b"", b"\xef\xbb\xbf"]) * bool(header) + header + body


def _read_lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line after the header."""
    lines = content.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n") if content else []
    for number, line in enumerate(lines, start=1):
        yield number, line.rstrip(b"\r").decode(errors="replace")


def _fields(line: str, separator: str) -> list[str] | None:
    """Return the fields of a line, or None if it is empty, contains a NUL byte, or a quoted field does not end well."""
    if not line or "\0" in line:
        return None
    if len(separator) > 1:
        return line.split(separator)
    fields, position = [], 0
    while True:
        if line.startswith('"', position):
            quoted = re.compile('"((?:[^"]|"")*)"').match(line, position)
            if quoted is None or line[quoted.end() : quoted.end() + 1] not in ("", separator):
                return None
            value, position = quoted[1].replace('""', '"'), quoted.end()
        else:
            value = line[position:].split(separator)[0]
            position += len(value)
        fields.append(value)
        if position == len(line):
            return fields
        position += 1


def _in_small_blocks(rng: random.Random, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", rng.choice([rng.randrange(size // 4 + 1, size + 1), 1 << 24]))


def _compressed(content: bytes, suffix: str, half: int) -> bytes:
    """Compress a file in two parts, which decompressors read as one."""
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "gz": partial(gzip.compress, compresslevel=1),
        "bz2": bz2.compress,
        "zst": partial(pa.Codec("zstd").compress, asbytes=True),
    }
    compress = compressors.get(suffix, bytes)
    return compress(content[:half]) + compress(content[half:])


def _check_rows(table: Table, expected: list[tuple[int, str, tuple[str | None, ...] | None]], content: bytes) -> None:
    """Check that the ways to read a table agree; expected are line, text and values of each row, None if it is bad."""
    for numbers in ({}, dict.fromkeys(table.dtypes, pl.Int64())):
        found = []
        for rows in table.read(numbers):
            texts = rows.texts(pl.Series(range(len(rows.frame))))
            values = rows.frame.select(FAULT, *table.dtypes).iter_rows()
            for line, text, (fault, *row) in zip(count(rows.first_line), texts, values, strict=False):
                found.append((line, text, None if fault else _as_text(row, table.dtypes)))
        assert found == expected, content


def _as_text(values: list[str | int | None], dtypes: Mapping[str, pl.DataType]) -> tuple[str | None, ...]:
    assert all(isinstance(value, int) for value in values) or set(dtypes.values()) == {pl.String}
    return tuple(None if value is None else str(value) for value in values)


def _check_table(rng: random.Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    separator, suffix = rng.choice(
        [(",", "csv"), (",", "csv.gz"), ("\t", "tsv"), (";", "csv"), ("|", "txt.zst"), ("::", "dat.bz2"), ("::", "dat")]
    )
    fields = [[b"1", b"2", b'"a,b\t"', b"3"], [b"x", b"", b"5", b""], [b'"q""r"', b"y", b"", b"7"], [b"1", b"2"]]
    if rng.random() < 0.4:  # lines of numbers, most of which stay numbers
        numbers = [b"0", b"-1", b"12", str(2**63 - 1).encode()] * 9 + [str(2**63).encode(), b"007", b"-0", b"+7", b""]
        fields = [[rng.choice(numbers), b"x", b"", rng.choice(numbers)] for _ in range(3)]
    good = [separator.encode().join(line) for line in fields]
    header = separator.encode().join([b"user", b"item", b'"no""te"', b"time"]) + rng.choice([b"\n", b"\r\n"])
    content = _malformed(rng, header, good)
    path = folder / f"log.{suffix}"
    path.write_bytes(_compressed(content, suffix.rpartition(".")[2], rng.randrange(len(content))))
    _in_small_blocks(rng, monkeypatch, len(content))
    expected: list[tuple[int, str, tuple[str | None, ...] | None]] = []
    for number, line in list(_read_lines(content))[1:]:
        row = _fields(line, separator)
        is_good = row is not None and len(row) == 4 and "\ufffd" not in row[0] + row[3]
        expected.append((number, line, (row[0], row[3]) if row and is_good else None))
    _check_rows(open_table(path, ("user", "time")), expected, content)


def _check_json(rng: random.Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [b'{"user": 1, "note": {"a": [1, 2]}, "time": "007"}', b'{"time": null, "user": "\\u00e9\\ud83d\\ude00"}']
    good += [b'{"user": 18446744073709551615, "time": -9223372036854775808}', b'{"user": true, "x": 1e400, "time": ""}']
    good += [b'{"user": NaN, "x": -Infinity, "time": 9007199254740993.0}', b'{"user": 4.5e18, "time": [NaN, ", 1e99"]}']
    good += [b'{"user": "x", "time": 1.50}', b'{"user": "\\ud800", "time": 1}', b"[1]", b'"user"']
    content = _malformed(rng, b"", [*good[:3] * 4, *good])
    path = folder / rng.choice(["log.json", "log.jsonl.gz", "log.ndjson"])
    path.write_bytes(_compressed(content, path.suffix[1:], rng.randrange(len(content))))
    _in_small_blocks(rng, monkeypatch, len(content))
    table = open_table(path, ("user", "time"))
    expected: list[tuple[int, str, tuple[str | None, ...] | None]] = []
    for number, line in _read_lines(content):
        expected.append((number, line, _json_values(line)))
    _check_rows(table, expected, content)


def _json_values(line: str) -> tuple[str | None, ...] | None:
    """Return user and time of a line of JSON, or None if it is bad; NaN and numbers that floats round are texts."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        return dict(reversed(pairs))  # of equal keys, the first

    try:
        parsed = json.loads(line, parse_constant=str, parse_float=_float_text, object_pairs_hook=unique)
    except ValueError:
        return None
    if not isinstance(parsed, dict):
        return None
    if re.search(r"[\ud800-\udfff]", json.dumps(parsed, ensure_ascii=False)) or any(
        "\ufffd" in str(parsed.get(key)) for key in ("user", "time")
    ):
        return None
    return tuple(_json_text(parsed.get(key)) for key in ("user", "time"))


def _float_text(digits: str) -> str:
    number = float(digits)
    if abs(number) >= 2**53:
        return re.sub(r"[eE]\+?", "e+", digits)
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _json_text(value: object) -> str | None:
    return value if isinstance(value, str) or value is None else json.dumps(value, ensure_ascii=False)


CHECKS = {
    "table": (_check_table, 14),
    "json": (_check_json, 8),
}


@pytest.mark.parametrize(
    ("first", "last"), [(0, 14), pytest.param(14, 10_040, marks=pytest.mark.long)], ids=["some", "very many"]
)
@pytest.mark.parametrize("name", CHECKS)
def test_both_readings_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: int, last: int) -> None:
    check, share = CHECKS[name]
    for seed in range(first * share, last * share):
        check(random.Random(seed), tmp_path, monkeypatch)
