import numpy as np
import pytest

from evenrank.preprocess.files.parse_numbers import DECIMAL, INTEGER, SKIPPED, parse_numbers

KINDS = np.array([INTEGER, SKIPPED, DECIMAL, INTEGER], dtype=np.int8)


def _parse(text: bytes, separator: bytes = b",") -> tuple[bool, list[list[int]], list[float]]:
    integers = np.zeros((3, text.count(b"\n")), dtype=np.int64)
    decimals = np.zeros_like(integers, dtype=np.float64)
    data = np.frombuffer(text, dtype=np.uint8)
    is_parsed = parse_numbers(data, separator[0], len(separator), KINDS, integers, decimals)
    return is_parsed, integers[[0, 2]].T.tolist(), decimals[1].tolist()


@pytest.mark.parametrize("separator", [b",", b"::"])
def test_plain_numbers_are_parsed_exactly(separator: bytes) -> None:
    text = b"-12,x,0.5,7\n9223372036854775807,,3.1415926535897,-1\n0,1.2.3,.25,0\n5,-,4.,123\n"
    integers = [[-12, 7], [9_223_372_036_854_775_807, -1], [0, 0], [5, 123]]
    assert _parse(text.replace(b",", separator), separator) == (True, integers, [0.5, 3.1415926535897, 0.25, 4.0])


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"1,x,2", b"1,x,2,3,4", b"1,x,2,", b"+1,x,2,3", b"1,x,-2,3", b"1,x,1.2.3,3", b"1,x,.,3", b"1,x,2e1,3"),
        *(
            b"9223372036854775808,x,2,3",
            b"10000000000000000000,x,2,3",
            b"1,x,1234567890.123456,3",
            b"1,\0,2,3",
            b"1,x,2,3 ",
            b'"1",x,2,3',
            b"--1,x,2,3",
            b"1,x,2,-0",
            b"00,x,2,3",
            b"-01,x,2,3",
        ),
    ],
)
def test_all_other_lines_are_left_to_the_slower_parser(line: bytes) -> None:
    assert not _parse(b"1,x,2,3\n" + line + b"\n")[0]
