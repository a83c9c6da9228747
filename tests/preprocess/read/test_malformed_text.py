"""Random malformed text against plain parsers: which lines are rows, and with which values."""

import bz2
import gzip
import json
import random
import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from evenrank.preprocess.read import text as text_files
from evenrank.preprocess.read.table import FAULT
from evenrank.preprocess.read.tabular import open_table

NASTY = [b"\0", b"\r", b"\n", b"\r\n", b'"', b'""', b",", b":", b"::", b"\t", b" ", b"\xef\xbb\xbf", b"\xff", b"\xc3"]
NASTY += ["é".encode(), "\u2028".encode(), "\x85".encode(), b"\f", b"\v", b"\x1c", b"\x1f\x8b", b"-", b"+", b".", b"'"]
NASTY += [b"0", b"1", b"1e0", b"9" * 19, b'"a""b"', b'\n"', b'"\n', b'a\0"', b"\\", b"#", b"\x1b", b"null", b"NaN"]
JSON = [b'{"user": 1, "note": {"a": [1, 2]}, "time": "007"}', b'{"time": null, "user": "\\u00e9\\ud83d\\ude00"}']
JSON = [*JSON, b'{"user": 18446744073709551615, "time": -9223372036854775808}'] * 5
JSON += [b'{"user": true, "x": 1e400, "time": ""}', b'{"user": NaN, "x": -Infinity, "time": 9007199254740993.0}']
JSON += [b'{"user": 4.5e18, "time": [NaN, ", 1e99"]}', b'{"user": "x", "time": 1.50}', b"[1]", b'"user"']
JSON += [b'{"user": "\\ud800", "time": 1}']
FIELDS = [[b"1", b"2", b'"a,b\t"', b"3"], [b"x", b"", b"5", b""], [b'"q""r"', b"y", b"", b"7"], [b"1", b"2"]]
NUMBERS = [b"0", b"-1", b"12", str(2**63 - 1).encode()] * 9 + [str(2**63).encode(), b"007", b"-0", b"+7", b""]
KINDS = [(",", "csv"), (",", "csv.gz"), ("\t", "tsv"), (";", "csv"), ("|", "txt.zst"), ("::", "dat.bz2"), ("::", "dat")]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(gzip.compress, compresslevel=1),
    "bz2": bz2.compress,
    "zst": partial(pa.Codec("zstd").compress, asbytes=True),
}
Values = tuple[str | None, ...]
# A name, what is in that file, the number of its first row, and what returns the values of a line, None if it is bad.
Case = tuple[str, bytes, int, Callable[[str], Values | None]]


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


def _table(rng: random.Random) -> Case:
    (separator, suffix), fields = rng.choice(KINDS), FIELDS
    if rng.random() < 0.4:  # lines of numbers, most of which stay numbers
        fields = [[rng.choice(NUMBERS), b"x", b"", rng.choice(NUMBERS)] for _ in range(3)]
    join = separator.encode().join
    header = join([b"user", b"item", b'"no""te"', b"time"]) + rng.choice([b"\n", b"\r\n"])
    return f"log.{suffix}", _malformed(rng, header, [*map(join, fields)]), 2, partial(_values, separator)


def _values(separator: str, line: str) -> Values | None:
    """Return user and time of a line, or None if it has other fields, a NUL byte, or one quoted field does not end."""
    fields, rest = line.split(separator) if len(separator) > 1 else [], separator + line
    while len(separator) == 1 and rest:
        field = re.compile(f'[{separator}](?:"((?:[^"]|"")*)"(?=[{separator}]|$)|(?!")([^{separator}]*))').match(rest)
        if field is None:
            return None
        fields.append(field[2] if field[1] is None else field[1].replace('""', '"'))
        rest = rest[field.end() :]
    is_good = len(fields) == 4 and "\0" not in line and "\ufffd" not in fields[0] + fields[3]
    return (fields[0], fields[3]) if is_good else None


def _json(rng: random.Random) -> Case:
    name = rng.choice(["log.json", "log.jsonl.gz", "log.ndjson"])
    return name, _malformed(rng, b"", JSON), 1, _json_values


def _json_values(line: str) -> Values | None:
    """Return user and time of a line of JSON, or None if it is bad; NaN and numbers that floats round are texts."""

    def first(pairs: list[tuple[str, object]]) -> dict[str, object]:
        return dict(reversed(pairs))  # of equal keys

    try:
        parsed = json.loads(line, parse_constant=str, parse_float=_float_text, object_pairs_hook=first)
        json.dumps(parsed, ensure_ascii=False).encode()  # which half of a surrogate pair is no text for
        values = [parsed.get(key) for key in ("user", "time")]
    except (ValueError, AttributeError):
        return None
    if any("\ufffd" in str(value) for value in values):
        return None
    return tuple(v if isinstance(v, str) or v is None else json.dumps(v, ensure_ascii=False) for v in values)


def _float_text(digits: str) -> str:
    if abs(number := float(digits)) >= 2**53:
        return re.sub(r"[eE]\+?", "e+", digits)
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


@pytest.mark.parametrize(
    ("first", "last"), [(0, 14), pytest.param(14, 10_040, marks=pytest.mark.long)], ids=["some", "very many"]
)
@pytest.mark.parametrize(("draw", "share"), [(_table, 14), (_json, 8)])
def test_both_readings_agree(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    draw: Callable[[random.Random], Case],
    share: int,
    first: int,
    last: int,
) -> None:
    for seed in range(first * share, last * share):
        rng = random.Random(seed)
        name, content, first_row, values_of = draw(rng)
        if content.startswith(b"\x1f\x8b"):  # which is refused, as no text begins with it
            continue
        path = Path(name)
        compress, half = COMPRESS.get(name.rpartition(".")[2], bytes), rng.randrange(len(content))
        path.write_bytes(compress(content[:half]) + compress(content[half:]))  # which decompressors read as one
        block_bytes = rng.choice([rng.randrange(len(content) // 4 + 1, len(content) + 1), 1 << 24])
        monkeypatch.setattr(text_files, "_BLOCK_BYTES", block_bytes)
        lines = content.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
        texts = [line.rstrip(b"\r").decode(errors="replace") for line in lines]
        expected = [(number, text, values_of(text)) for number, text in enumerate(texts, 1)][first_row - 1 :]
        table = open_table(path, ("user", "time"))
        for numbers in ({}, dict.fromkeys(table.dtypes, pl.Int64())):
            found = []
            for rows in table.read(numbers):
                of_file = rows.texts(pl.Series(range(len(rows.frame))))
                of_rows = rows.frame.select(FAULT, *table.dtypes).iter_rows()
                for number, text, (fault, *row) in zip(count(rows.first_line), of_file, of_rows, strict=False):
                    assert fault or all(isinstance(v, int) for v in row) or {*table.dtypes.values()} == {pl.String}
                    values = tuple(None if value is None else str(value) for value in row)
                    found.append((number, text, None if fault else values))
            assert found == expected, content
