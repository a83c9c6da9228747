import gzip
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from evenrank.core.errors import DataError
from evenrank.preprocess.sources import tabular
from evenrank.preprocess.sources.catalog import CATALOG, MovieLensDataset
from evenrank.preprocess.sources.interactions import IS_GOOD, IS_WELL_FORMED, EventPart
from evenrank.preprocess.sources.kuairand import read_kuairand
from evenrank.preprocess.sources.movielens import read_movielens
from evenrank.preprocess.sources.tabular import open_table
from tests.preprocess.sources.test_kuairand import GOOD, LOG_HEADER, PURE, USERS, USERS_HEADER, write

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


def _quoted_fields(line: str, separator: str) -> list[str] | None:
    """Return the fields of a line, or None if it is empty, contains a NUL byte, or a quoted field does not end well."""
    if not line or "\0" in line:
        return None
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


def _movielens_row(line: str, separator: str, ratings_per_star: int) -> tuple[int, int, int, int] | None:
    """Return user, item, action and time of a line of ratings, or None if it is bad."""
    fields = line.split(separator)
    if len(fields) != 4 or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", fields[2], re.ASCII):
        return None
    user, movie, time = (_int64(fields[index]) for index in (0, 1, 3))
    step = float(fields[2]) * ratings_per_star
    if user is None or movie is None or time is None or movie < 0 or not 0 <= time <= 253_402_300_799_999 // 1000:
        return None
    return (user, movie, int(step) - 1, time * 1000) if step in range(1, 5 * ratings_per_star + 1) else None


def _kuairand_row(line: str) -> tuple[int, ...] | None:
    """Return user, item, action, time and the two durations of a line of a log, or None if it is bad."""
    fields = line.split(",")
    if "\0" in line or len(fields) != 19:
        return None
    numbers = [_int64(fields[index]) for index in (0, 1, 4, 12, 13, 18)]
    flags = [_int64(fields[index]) for index in (*range(5, 12), 16)]
    user, video, time, play, duration, _ = (-1 if number is None else number for number in numbers)
    if (
        None in numbers
        or video < 0
        or not 0 <= time <= 253_402_300_799_999
        or not all(flag in (0, 1) for flag in flags)
    ):
        return None
    action = sum(1 << bit for bit, flag in enumerate(flags) if flag)
    return user, video, action, time, play, duration


def _int64(text: str) -> int | None:
    if not re.fullmatch("[+-]?[0-9]+", text):
        return None
    number = int(text)
    return number if -(2**63) <= number < 2**63 else None


def _in_small_blocks(rng: random.Random, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(tabular, "_BLOCK_BYTES", rng.choice([rng.randrange(size // 4 + 1, size + 1), 1 << 24]))


def _check_table(rng: random.Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    separator, suffix = rng.choice([(",", "csv"), (",", "csv.gz"), ("\t", "tsv")])
    fields = [[b"1", b"2", b'"a,b\t"', b"3"], [b"x", b"", b"5", b""], [b'"q""r"', b"y", b"", b"7", b""], [b"1", b"2"]]
    good = [separator.encode().join(line) for line in fields]
    header = separator.encode().join([b"user", b"item", b'"no""te"', b"time"]) + rng.choice([b"\n", b"\r\n"])
    content = _malformed(rng, header, good)
    path = folder / f"log.{suffix}"
    half = rng.randrange(len(content))
    compressed = gzip.compress(content[:half], 1) + gzip.compress(content[half:], 1)
    path.write_bytes(compressed if suffix == "csv.gz" else content)
    _in_small_blocks(rng, monkeypatch, len(content))
    table = open_table(path, ("user", "time"))
    expected: list[tuple[int, str, tuple[str, str] | None]] = []
    for number, line in list(_read_lines(content))[1:]:
        row = _quoted_fields(line, separator)
        is_bad = row is None or len(row) < 4 or any(row[4:5])
        expected.append((number, line, None if row is None or is_bad else (row[0], row[3])))
    described = table.described_rows.collect()
    strict = [(line, text, None if fault else values) for line, text, fault, *values in described.iter_rows()]
    assert [(line, text, values and tuple(values)) for line, text, values in strict] == expected, content
    # Of a row that is too short, the quick reading says so by a null; both are bad rows where it matters.
    rows = table.rows.collect().rows()
    quick = [(user or "", time or "") if is_well_formed else None for user, time, is_well_formed in rows]
    complete = [values if values and all(values) else None for _, _, values in expected]
    assert [values if values and all(values) else None for values in quick] == complete, content
    assert len(expected) == len(quick)


def _check_part(
    part: EventPart, parse: Callable[[str], tuple[int, ...] | None], content: bytes, *, has_header: bool = True
) -> None:
    expected = [(number, line, parse(line)) for number, line in list(_read_lines(content))[has_header:]]
    rows = part.events.collect()
    is_good = rows.get_column(IS_GOOD).to_list()
    assert is_good == [values is not None for *_, values in expected], content
    assert rows.filter(IS_GOOD).drop(IS_GOOD).rows() == [values for *_, values in expected if values], content
    bad = [(row.line, row.text) for row in part.find_bad(1 << 30)]
    assert bad == [(number, text) for number, text, values in expected if values is None], content


def _check_movielens(rng: random.Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = CATALOG[rng.choice(["ml-1m", "ml-20m"])]
    assert isinstance(dataset, MovieLensDataset)
    separator = dataset.separator.encode()
    good = [separator.join(row) for row in ([b"1", b"2", b"3", b"4"], [b"-5", b"0", b"1.0", b"253402300799"])]
    header = b"userId,movieId,rating,timestamp\n" if dataset.has_header else b""
    content = _malformed(rng, header, good)
    write(folder, {"users.dat": ("1::F::1::10::48067",)})
    (folder / dataset.events[0]).write_bytes(content)
    _in_small_blocks(rng, monkeypatch, len(content))
    parse = partial(_movielens_row, separator=dataset.separator, ratings_per_star=dataset.ratings_per_star)
    _check_part(read_movielens(dataset, folder).parts[0], parse, content, has_header=dataset.has_header)


def _check_kuairand(rng: random.Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = _malformed(rng, LOG_HEADER.encode() + b"\n", [GOOD.encode(), GOOD.replace(",0,", ",1,").encode()])
    first, second = PURE.events
    write(folder, {second: (LOG_HEADER, GOOD), PURE.files[-1]: (USERS_HEADER, *USERS)})
    (folder / first).write_bytes(content)
    _in_small_blocks(rng, monkeypatch, len(content))
    _check_part(read_kuairand(PURE, folder).parts[0], _kuairand_row, content)


def test_a_nul_byte_makes_its_line_a_bad_row_and_hides_no_quote(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b'user,time\n1,2\na\0",3\n4,"5\n6,7\n')
    table = open_table(path, ("user", "time"))
    assert table.rows.collect().get_column(IS_WELL_FORMED).to_list() == [True, False, False, True]
    assert [(row.line, row.text, row.reason) for row in table.find_bad({"": pl.lit(True)}, 1)] == [
        (3, 'a\0",3', "the line contains a NUL byte; the file is damaged there")
    ]


def test_a_line_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "_MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(tabular, "_BLOCK_BYTES", 1 << 20)
    path = tmp_path / "log.csv"
    for content, line in ((b"a,b\n1,2\n" + bytes(3 << 20), 3), (bytes(3 << 20), 1)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"log\.csv, line {line} is longer than 1 MiB; check that it is a text"):
            open_table(path, ("a", "b"))


def test_no_line_of_the_users_features_is_hidden_or_divided(tmp_path: Path) -> None:
    users = tmp_path / "users.dat"
    write(tmp_path, {"ratings.dat": ("1::2::3::4",)})
    users.write_bytes("1::F::1::10::\u2028\x85\x0c48067\n2::M::1::1::1\n".encode())
    dataset = CATALOG["ml-1m"]
    assert isinstance(dataset, MovieLensDataset)
    context = read_movielens(dataset, tmp_path).context
    assert context is not None
    assert context.labels["zip_code"] == (None, "1", "\u2028\x85\x0c48067")
    users.write_bytes(b"1::F::1::10::\0\n")
    with pytest.raises(DataError, match=r"users\.dat, line 1 \('1::F::1::10::.x00'\): the line contains a NUL byte"):
        read_movielens(dataset, tmp_path)
    # Read as one row, the two lines would have the right number of fields.
    lines = ('1,high,0,0,0,5,"(0,10]",0,0,0,0,1,"a,' + "," * 16, '2",' + "," * 16)
    write(tmp_path, {PURE.events[0]: (LOG_HEADER, GOOD), PURE.events[1]: (LOG_HEADER, GOOD)})
    write(tmp_path, {PURE.files[-1]: (USERS_HEADER, *lines)})
    with pytest.raises(DataError, match=r"user_features_pure\.csv, line 2 .*: a quoted field does not end at"):
        read_kuairand(PURE, tmp_path)


CHECKS = {"table": (_check_table, 14), "movielens": (_check_movielens, 3), "kuairand": (_check_kuairand, 3)}


@pytest.mark.parametrize(
    ("first", "last"), [(0, 40), pytest.param(40, 10_040, marks=pytest.mark.long)], ids=["some", "very many"]
)
@pytest.mark.parametrize("name", CHECKS)
def test_both_readings_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: int, last: int) -> None:
    check, share = CHECKS[name]
    for seed in range(first * share, last * share):
        check(random.Random(seed), tmp_path, monkeypatch)
