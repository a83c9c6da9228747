"""Lines of delimited text -> arrays: numbers in plain digits or, several times slower, any fields as text."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.numba_cache import compiled

# Kinds of a column: integers have neither leading zeros nor a -0, decimals have no sign.
SKIPPED, INTEGER, DECIMAL = 0, 1, 2
EMPTY, NUL, UNQUOTED, OPEN = 0, -1, -2, -3  # in place of the number of fields of a line
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
        kinds: SKIPPED, INTEGER or DECIMAL for each column of a line.
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
            if is_integer and data[begin] == _ZERO and (is_negative or num_digits > 1):
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
def split_fields(
    data: NDArray[np.uint8],
    separator: int,
    width: int,
    outputs: NDArray[np.int64],
    texts: NDArray[np.uint8],
    ends: NDArray[np.int64],
    num_fields: NDArray[np.int64],
) -> None:
    """Divide lines into fields, which may be enclosed in quotes if the separator is one byte wide.

    Args:
        data: whole lines.
        separator: byte between fields.
        width: how often it is repeated.
        outputs: for each column of a line, the row of `texts` to which its fields are copied, or -1.
        texts: [outputs, bytes]: filled with the fields of all lines, without quotes.
        ends: [outputs, lines + 1]: zeros, filled with the ends of fields in `texts`; those of bad lines are empty.
        num_fields: [lines]: filled with the number of fields, or EMPTY, NUL, or where quotes do not end
            well, UNQUOTED; OPEN if the line ends before them.
    """
    position, one = np.uint64(0), np.uint64(1)
    lengths = np.zeros(len(texts), dtype=np.uint64)
    for line in range(len(num_fields)):
        count, num_nuls, is_divided = 0, 0, data[position] == _NEWLINE
        num_fields[line] = EMPTY if is_divided else UNQUOTED
        while not is_divided:
            output = outputs[count] if count < len(outputs) else -1
            is_quoted = width == 1 and data[position] == _QUOTE
            position += np.uint64(is_quoted)
            while data[position] != _NEWLINE:
                if is_quoted and data[position] == _QUOTE:
                    if data[position + one] != _QUOTE:
                        break
                    position += one
                elif not is_quoted and _is_separator(data, position, separator, width):
                    break
                num_nuls += data[position] == 0
                if output >= 0:
                    texts[output, lengths[output]] = data[position]
                    lengths[output] += one
                position += one
            count += 1
            if is_quoted:
                if data[position] == _NEWLINE:
                    num_fields[line] = OPEN
                    break
                position += one
            if data[position] == _NEWLINE:
                num_fields[line] = count
                is_divided = True
            elif _is_separator(data, position, separator, width):
                position += np.uint64(width)
            else:
                break
        while data[position] != _NEWLINE:
            num_nuls += data[position] == 0
            position += one
        if num_nuls:
            num_fields[line] = NUL
        for output in range(len(texts)):
            if num_fields[line] != len(outputs):
                lengths[output] = np.uint64(ends[output, line])
            ends[output, line + 1] = np.int64(lengths[output])
        position += one


@compiled
def _is_separator(data: NDArray[np.uint8], position: np.uint64, separator: int, width: int) -> bool:
    for _ in range(width):
        if data[position] != separator:
            return False
        position += np.uint64(1)
    return True
