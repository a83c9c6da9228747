"""Layouts of small steps, of which every number was worked out by hand."""

import itertools
from typing import Any

import numpy as np
import pytest

from evenrank.dataloader.balance.exchange.layout import (
    Sections,
    lay_out,
    output_parts,
    received_copies,
    sent_chunks,
    write_host_buffer,
)

# By the bytes of an element: which bounds are those of its dtype, from the begin of the buffer to its end.
VIEWS = {8: (0, 2, 3, 1), 4: (0, 4, 5, 6, 7, 8, 9, 1)}
# A jagged key of int64 values, whose lengths are int32 and count loss tokens, and a dense field of 4 bytes.
SECTIONS = Sections(
    tensor=np.array([0, 1]),
    key=np.array([0, -1]),
    element_bytes=np.array([8, 4]),
    padding_starts=np.array([0, 0, 4]),
    padding=np.full(4, 255, dtype=np.uint8),
    jagged_fields=np.array([[0, 1, 4]]),
    views=np.array([(*view, size) for size, views in VIEWS.items() for view in itertools.pairwise(views)]),
    loss_key=0,
    loss_skip=1,
)
# Rank 0 has samples of 3, 1 and 0 values, rank 1 of 2 and 5 values and a padding row.
LENGTHS = np.array([[[3, 1, 0]], [[2, 5, 0]]])
RANK_OF = np.array([[0, 1, 1], [1, 0, -1]], dtype=np.int32)
# New rows are in the order of the ranks that they come from, then of rows. Parts of the output begin aligned: the
# values, the dense rows, then lengths and offsets. As int64 there are nothing, the values, the rest; as int32 values,
# dense rows, a gap, lengths, a gap, offsets, nothing.
OF_RANKS: list[dict[str, Any]] = [
    {"num_real": 2, "loss_tokens": 2 + 4, "world_loss_tokens": 7, "lengths": [[3, 5, 0]], "length_per_key": [8]}
    | {"max_lengths": [5], "views": [0, 8, 6, 16, 3, 1, 3, 1, 4, 0], "output_bytes": 112},
    {"num_real": 3, "loss_tokens": 0 + 0 + 1, "world_loss_tokens": 7, "lengths": [[1, 0, 2]], "length_per_key": [3]}
    | {"max_lengths": [2], "views": [0, 3, 7, 8, 3, 1, 3, 1, 4, 0], "output_bytes": 80},
]
# Copies have the source (0: received, 1: uploaded), the place there, the place in the output, and bytes. The last ones
# are of what the host knows: lengths and offsets and, of rank 0, a padding row.
EXCHANGES: dict[tuple[bool, int], dict[str, Any]] = {
    # A chunk for the other rank, then its own, which is not sent.
    (False, 0): {"send_bytes": [0, 32], "receive_bytes": [0, 64], "chunk_starts": [[32, 64], [0, 16]], "host_data": 80}
    | {"copies": [(1, 32, 0, 24), (1, 64, 64, 4), (0, 0, 24, 40), (0, 48, 68, 4), (1, 80, 80, 32), (1, 112, 72, 4)]},
    (False, 1): {"send_bytes": [64, 0], "receive_bytes": [32, 0], "chunk_starts": [[0, 48], [64, 80]], "host_data": 96}
    | {"copies": [(0, 0, 0, 8), (0, 16, 32, 8), (1, 64, 8, 16), (1, 80, 40, 4), (1, 96, 48, 32)]},
    # One chunk with the size of the largest, that of rank 1: 7 values, 2 rows. It begins at 80, its rows at 144.
    (True, 0): {"send_bytes": [80], "receive_bytes": [80, 80], "chunk_starts": [[0, 32]], "host_data": 80}
    | {"copies": [(0, 0, 0, 24), (0, 32, 64, 4), (0, 96, 24, 40), (0, 148, 68, 4), (1, 80, 80, 32), (1, 112, 72, 4)]},
    (True, 1): {"send_bytes": [80], "receive_bytes": [80, 80], "chunk_starts": [[0, 64]], "host_data": 80}
    | {"copies": [(0, 24, 0, 8), (0, 36, 32, 8), (0, 80, 8, 16), (0, 144, 40, 4), (1, 80, 48, 32)]},
}


@pytest.mark.parametrize(("sends_all", "rank"), EXCHANGES)
def test_layouts_of_two_ranks(sends_all: bool, rank: int) -> None:
    layout = lay_out(SECTIONS, RANK_OF, LENGTHS, 3, rank, sends_all, 8192)
    expected = OF_RANKS[rank] | EXCHANGES[sends_all, rank]
    for name, value in expected.items():
        assert np.array_equal(getattr(layout, name), value), name
    # Lengths, offsets, of rank 0 a padding row; then the tiles.
    assert layout.tiles == layout.host_data + 16 + 16 + 16 * (rank == 0)
    assert layout.host_bytes == layout.tiles + 8 * layout.copies.size


@pytest.mark.parametrize(
    ("sends_all", "values", "rows", "first_tiles"),
    [
        (False, {0: [20], 32: [10, 11, 12]}, {16: [101, 102], 64: [100]}, [[1, 32, 0, 16], [1, 48, 16, 8]]),
        (True, {0: [10, 11, 12, 20]}, {32: [100, 101, 102]}, [[0, 0, 0, 16], [0, 16, 16, 8]]),
    ],
)
def test_the_host_buffer_has_the_samples_by_destination_then_what_the_host_knows_and_tiles(
    sends_all: bool, values: dict[int, list[int]], rows: dict[int, list[int]], first_tiles: list[list[int]]
) -> None:
    own = np.array([10, 11, 12, 20]), np.array([100, 101, 102], dtype=np.int32)  # the tensors of rank 0
    layout = lay_out(SECTIONS, RANK_OF, LENGTHS, 3, 0, sends_all, 16)
    buffer = np.full(layout.host_bytes, 7, dtype=np.uint8)
    addresses = np.array([[tensor.ctypes.data for tensor in own]])
    write_host_buffer(layout, SECTIONS, addresses, LENGTHS[0], RANK_OF[0], 16, buffer)
    assert (layout.host_data, layout.tiles) == (80, 128)
    int32 = {**rows, 80: [3, 5, 0], 96: [0, 3, 8, 8]}  # the dense rows that it sends; new lengths and offsets
    for dtype, expected in ((np.int64, values), (np.int32, int32), (np.uint8, {112: [255] * 4})):
        for start, numbers in expected.items():
            assert np.frombuffer(buffer, dtype, len(numbers), start).tolist() == numbers
    tiles = np.frombuffer(buffer, np.int64, offset=layout.tiles).reshape(-1, 4)
    assert tiles[:2].tolist() == first_tiles  # of the 24 bytes of its own first sample
    assert tiles[:, 3].sum() == layout.copies[:, 3].sum()


# Two jagged fields, of one int32 key with int32 lengths and of two int64 keys with int64 lengths, and dense fields of 1
# and 8 bytes; each sample is one loss token.
TWO_FIELDS = Sections(
    tensor=np.array([0, 1, 1, 2, 3]),
    key=np.array([0, 1, 2, -1, -1]),
    element_bytes=np.array([4, 8, 8, 1, 8]),
    padding_starts=np.array([0, 0, 0, 0, 1, 9]),
    padding=np.array([9, *np.array([7]).view(np.uint8)], dtype=np.uint8),
    jagged_fields=np.array([[0, 1, 4], [1, 2, 8]]),
    views=np.empty((0, 3), dtype=np.int64),
    loss_key=-1,
    loss_skip=0,
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
    layout = lay_out(TWO_FIELDS, THREE_RANKS, OF_THREE, 5, 1, sends_all, 0)
    assert (layout.num_real, layout.loss_tokens, layout.world_loss_tokens) == (3, 3, 9)
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
    layout = lay_out(TWO_FIELDS, THREE_RANKS, OF_THREE, 5, 1, False, 0)
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
    layout = lay_out(BYTES, rank_of, ONE_EACH, 17, 0, False, 0)
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
