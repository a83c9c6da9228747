"""Lines of numbers in plain digits -> arrays, several times as fast as a CSV reader that copes with everything else."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled

# Kinds of a column: plain integers have neither leading zeros nor a -0, decimals have no sign.
SKIPPED, INTEGER, DECIMAL, PLAIN_INTEGER = 0, 1, 2, 3
_NEWLINE, _MINUS, _POINT, _ZERO, _QUOTE = b'\n-.0"'


@compiled
def parse_numbers(
    data: NDArray[np.uint8],
    separator: int,
    width: int,
    kinds: NDArray[np.int8],
    integers: NDArray[np.int64],
    decimals: NDArray[np.float64],
) -> bool:
    """Parse lines of numbers.

    Args:
        data: whole lines.
        separator: byte between fields.
        width: how often it is repeated.
        kinds: SKIPPED, INTEGER, DECIMAL or PLAIN_INTEGER for each column of a line.
        integers, decimals: [columns, lines]; column by column, without those skipped, one of the two is filled.

    Returns:
        False if a line has another form, though it may be well formed; the results are undefined then.
    """
    position, one = np.uint64(0), np.uint64(1)  # unsigned, because an index that may be negative takes twice as long
    line = 0
    while position < len(data):
        row = 0
        for column in range(len(kinds)):
            for _ in range(width if column > 0 else 0):
                if data[position] != separator:
                    return False
                position += one
            if kinds[column] == SKIPPED:
                while data[position] != separator and data[position] != _NEWLINE:
                    if data[position] == 0:
                        return False
                    position += one
                continue
            is_integer = kinds[column] != DECIMAL
            is_negative = is_integer and data[position] == _MINUS
            position += np.uint64(is_negative)
            begin = position
            value, scale = np.int64(0), 1.0  # a power of ten
            while 0 <= np.int64(data[position]) - _ZERO <= 9:
                value = 10 * value + np.int64(data[position]) - _ZERO
                position += one
            num_digits = position - begin
            if not is_integer and data[position] == _POINT:
                position += one
                while 0 <= np.int64(data[position]) - _ZERO <= 9:
                    value = 10 * value + np.int64(data[position]) - _ZERO
                    scale *= 10.0
                    num_digits += one
                    position += one
            # Integers below 10^19 fit into a uint64, and become negative if they do not fit into an int64. Below 10^15,
            # both operands of the division are exact.
            if num_digits == 0 or num_digits > (19 if is_integer else 15) or value < 0:
                return False
            if kinds[column] == PLAIN_INTEGER and data[begin] == _ZERO and (is_negative or num_digits > 1):
                return False
            if is_integer:
                integers[row, line] = -value if is_negative else value
            else:
                decimals[row, line] = value / scale
            row += 1
        if data[position] != _NEWLINE:
            return False
        position += one
        line += 1
    return True


@compiled
def count_fields(data: NDArray[np.uint8], separator: int, counts: NDArray[np.int32]) -> bool:
    """Count the fields of each line of whole lines, 0 for an empty line; False if a quote does not enclose a field."""
    position, one = np.uint64(0), np.uint64(1)
    for line in range(len(counts)):
        counts[line] = 0 if data[position] == _NEWLINE else 1
        while True:
            if data[position] == _QUOTE:
                position += one
                while data[position] != _QUOTE:
                    if data[position] == _NEWLINE:
                        return False
                    position += one
                position += one
            else:
                while data[position] != separator and data[position] != _NEWLINE:
                    if data[position] == _QUOTE:
                        return False
                    position += one
            if data[position] == _NEWLINE:
                break
            if data[position] != separator:
                return False
            counts[line] += 1
            position += one
        position += one
    return True
