"""Layouts of small steps, of which every number was worked out by hand."""

from typing import Any

import numpy as np
import pytest

from evenrank.dataloader.balance.exchange.layout import (
    Sections,
    lay_out,
    new_rows,
    output_parts,
    received_copies,
    sent_chunks,
    write_host_buffer,
)

# Two jagged fields, of one int32 key with int32 lengths and of two int64 keys with int64 lengths, and dense fields of 1
# and 8 bytes; values of the last key but the first of each sample are loss tokens.
TWO_FIELDS = Sections(
    tensor=np.array([0, 1, 1, 2, 3]),
    key=np.array([0, 1, 2, -1, -1]),
    element_bytes=np.array([4, 8, 8, 1, 8]),
    padding_starts=np.array([0, 0, 0, 0, 1, 9]),
    padding=np.array([9, *np.array([7]).view(np.uint8)], dtype=np.uint8),
    jagged_fields=np.array([[0, 1, 4], [1, 2, 8]]),
    views=np.empty((0, 3), dtype=np.int64),
    loss_key=2,
    loss_skip=1,
)
# [ranks, keys, rows] of 3 ranks. The rows that nobody trains on in this step are trained on in another one.
OF_THREE = np.array(
    [
        [[2, 1, 0, 9], [1, 0, 2, 9], [0, 1, 1, 9]],
        [[1, 3, 4, 0], [2, 0, 1, 1], [1, 1, 0, 2]],
        [[0, 2, 1, 9], [1, 1, 1, 9], [0, 0, 5, 9]],
    ]
)
THREE_RANKS = np.array([[1, 2, 0, -1], [2, 1, -1, 0], [0, 1, 2, -1]], dtype=np.int32)
# Of rank 1, in batches of 5 rows: its samples are row 0 of rank 0, its own row 1, and row 1 of rank 2.
NEW_LENGTHS = [[2, 3, 2, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 0, 0]]


def test_keys_of_a_field_follow_each_other_in_the_output_and_fields_begin_aligned() -> None:
    targets, bounds, *ends = output_parts(TWO_FIELDS, np.array(NEW_LENGTHS))
    assert targets.tolist() == [0, 32, 32 + 16, 64, 80]
    assert bounds[: 2 * 9].reshape(-1, 2).tolist() == [
        [0, 368],
        *([0, 7 * 4], [32, 32 + 3 * 8], [64, 64 + 5], [80, 80 + 5 * 8]),
        *([128, 128 + 5 * 4], [160, 160 + 6 * 4], [192, 192 + 10 * 8], [272, 272 + 11 * 8]),
    ]
    assert ends == [128, 368]


@pytest.mark.parametrize(
    ("sends_all", "sent", "received", "chunk_starts", "copies"),
    [
        (
            *(False, [64, 0, 80], [64, 0, 64]),
            [[0, 0, 16, 32, 48], [144, 160, 160, 176, 192], [64, 80, 96, 112, 128]],
            [
                *((0, 0, 0, 8), (0, 16, 32, 8), (0, 32, 64, 1), (0, 48, 80, 8)),
                *((1, 144, 8, 12), (1, 160, 48, 8), (1, 176, 65, 1), (1, 192, 88, 8)),
                *((0, 64, 20, 8), (0, 80, 40, 8), (0, 96, 66, 1), (0, 112, 96, 8)),
                *((1, 208, 128, 240), (1, 448, 67, 2), (1, 464, 104, 16)),
            ],
        ),
        (
            *(True, [144], [144, 144, 144]),  # as rank 2 needs
            [[0, 16, 48, 80, 96]],
            [
                *((0, 0, 0, 8), (0, 16, 32, 8), (0, 64, 64, 1), (0, 80, 80, 8)),
                *((0, 148, 8, 12), (0, 200, 48, 8), (0, 225, 65, 1), (0, 248, 88, 8)),
                *((0, 288, 20, 8), (0, 312, 40, 8), (0, 385, 66, 1), (0, 408, 96, 8)),
                *((1, 144, 128, 240), (1, 384, 67, 2), (1, 400, 104, 16)),
            ],
        ),
    ],
)
def test_a_rank_between_others_sends_to_both_and_copies_from_both(
    sends_all: bool, sent: list[int], received: list[int], chunk_starts: list[list[int]], copies: list[Any]
) -> None:
    layout = lay_out(
        TWO_FIELDS, THREE_RANKS, OF_THREE, new_rows(TWO_FIELDS, THREE_RANKS, OF_THREE, 5, 1), 1, sends_all, 0
    )
    assert (layout.num_real, layout.loss_tokens, layout.world_loss_tokens) == (3, 0, 5)
    assert (layout.max_lengths.tolist(), layout.length_per_key.tolist()) == ([3, 1, 1], [7, 2, 1])
    assert layout.lengths.tolist() == NEW_LENGTHS
    assert (layout.send_bytes.tolist(), layout.receive_bytes.tolist()) == (sent, received)
    assert layout.chunk_starts.tolist() == chunk_starts
    assert [*map(tuple, layout.copies.tolist())] == copies


def test_the_host_buffer_has_rows_of_several_batches_and_every_padding_row_and_nothing_in_gaps() -> None:
    batches = [  # of 2 rows each; a row that is trained on in another step is between others
        (np.array([10, 11, 12, 13], np.int32), np.array([20, 21, 30, 31]), np.array([50, 51], np.uint8), [60, 61]),
        (np.array([14, 15, 16, 17], np.int32), np.array([22, 23, 32, 33]), np.array([52, 53], np.uint8), [62, 63]),
    ]
    tensors = [[np.array(tensor) for tensor in batch] for batch in batches]
    addresses = np.array([[tensor.ctypes.data for tensor in batch] for batch in tensors])
    layout = lay_out(TWO_FIELDS, THREE_RANKS, OF_THREE, new_rows(TWO_FIELDS, THREE_RANKS, OF_THREE, 5, 1), 1, False, 0)
    buffer = np.full(layout.host_bytes, 255, dtype=np.uint8)
    write_host_buffer(layout, TWO_FIELDS, addresses, OF_THREE[1], THREE_RANKS[1], 0, buffer)
    expected = np.full(480, 255, dtype=np.uint8)
    written = [
        *((0, np.int64, [23]), (16, np.int64, [32, 33]), (32, np.uint8, [53]), (48, np.int64, [63])),  # to rank 0
        *((64, np.int32, [10]), (80, np.int64, [20, 21]), (96, np.int64, [30])),  # to rank 2
        *((112, np.uint8, [50]), (128, np.int64, [60])),
        *((144, np.int32, [11, 12, 13]), (160, np.int64, [31]), (176, np.uint8, [51]), (192, np.int64, [61])),  # kept
        (208, np.int32, [2, 3, 2, 0, 0]),  # lengths and offsets
        (240, np.int32, [0, 2, 5, 7, 7, 7]),
        (272, np.int64, [1, 0, 1, 0, 0, 0, 1, 0, 0, 0]),
        (352, np.int64, [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]),
        *((448, np.uint8, [9, 9]), (464, np.int64, [7, 7])),  # two padding rows of each dense field
    ]
    for start, dtype, values in written:
        as_bytes = np.array(values, dtype).view(np.uint8)
        expected[start : start + len(as_bytes)] = as_bytes
    assert buffer.tolist() == expected.tolist()


# A field of two keys and two dense fields, all of single bytes: what is one byte too long takes 16 more.
BYTES = Sections(
    tensor=np.array([0, 0, 1, 2]),
    key=np.array([0, 1, -1, -1]),
    element_bytes=np.ones(4, dtype=np.int64),
    padding_starts=np.array([0, 0, 0, 1, 2]),
    padding=np.array([7, 8], dtype=np.uint8),
    jagged_fields=np.array([[0, 2, 4]]),
    views=np.empty((0, 3), dtype=np.int64),
    loss_key=-1,
    loss_skip=0,
)
# Of 2 ranks: each of 17 rows has a value of the first key, and each but the last one of the second.
ONE_EACH = np.array([[[1] * 17, [1] * 16 + [0]]] * 2)


def test_a_part_that_is_a_byte_longer_than_a_multiple_of_the_alignment_takes_one_more() -> None:
    for num_rows, expected_targets, expected_data in ((16, [0, 16, 32, 48], 64), (17, [0, 17, 48, 80], 112)):
        targets, _, output_data, _ = output_parts(BYTES, ONE_EACH[0, :, :num_rows])
        assert (targets.tolist(), output_data) == (expected_targets, expected_data)


def test_an_all_gather_has_room_for_a_copy_of_each_row_and_an_exchange_for_one_of_each_chunk() -> None:
    every_other = np.array([[*[0, 1] * 8, -1], [*[1, 0] * 8, 1]], dtype=np.int32)
    halves = np.array([[0] * 8 + [1] * 9, [0] * 9 + [1] * 8], dtype=np.int32)
    targets, own_start = [0, 17, 48, 80], 16 * 4  # after 9 or 8 bytes of each section for rank 1
    copies_of_halves = [
        *([1, own_start + 16 * section, target, 8] for section, target in enumerate(targets)),
        *([0, 16 * section, target + 8, 9] for section, target in enumerate(targets)),
    ]
    for rank_of, sends_all, num_expected, room, first_copies in (
        (every_other, True, 16 * 4, 17 * 4, [[0, 0, 0, 1], [0, 2, 1, 1]]),
        (halves, False, 2 * 4, 2 * 4, copies_of_halves),
    ):
        send_bytes, chunk_starts, _ = sent_chunks(BYTES, rank_of, ONE_EACH, 0, sends_all)
        sizes = BYTES, rank_of, ONE_EACH, 17, 0, sends_all, send_bytes, chunk_starts, np.array(targets)
        _, copies, num_copies = received_copies(*sizes)
        assert copies[: len(first_copies)].tolist() == first_copies
        # Besides them, room for a copy of the padding of each section, and for one of lengths and offsets.
        assert (num_copies, len(copies)) == (num_expected, room + 4 + 1)
        assert not sends_all or send_bytes.tolist() == [32 + 16 + 32 + 32]  # of rank 1, whose last row is a sample


@pytest.mark.parametrize("num_real", [1, 16])
def test_padding_rows_of_each_dense_field_begin_aligned_after_the_offsets(num_real: int) -> None:
    rank_of = np.array([[0] * num_real + [-1] * (17 - num_real), [-1] * 17], dtype=np.int32)
    layout = lay_out(BYTES, rank_of, ONE_EACH, new_rows(BYTES, rank_of, ONE_EACH, 17, 0), 0, False, 0)
    tensors = [np.arange(first, first + 34, dtype=np.uint8) for first in (0, 100, 200)]
    addresses = np.array([[tensor.ctypes.data for tensor in tensors]])
    buffer = np.full(layout.host_bytes, 255, dtype=np.uint8)
    write_host_buffer(layout, BYTES, addresses, ONE_EACH[0], rank_of[0], 0, buffer)
    for section, first in enumerate((0, 17, 100, 200)):  # 17 values, then 16
        assert buffer[16 * section : 16 * section + num_real].tolist() == [*range(first, first + num_real)]
    padding = 64 + 144 + 144  # after the chunk, 34 int32 lengths, 35 offsets
    assert layout.host_bytes == padding + 16 + 16
    for start, value in ((padding, 7), (padding + 16, 8)):
        assert buffer[start : start + 17 - num_real].tolist() == [value] * (17 - num_real)
