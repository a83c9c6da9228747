import itertools

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
# Values and dense rows of each chunk, by sender and receiver, each section aligned to 16 bytes.
CHUNKS = {(0, 0): [32, 16], (0, 1): [16, 16], (1, 0): [48, 16], (1, 1): [16, 16]}


def test_new_rows_are_in_the_order_of_the_ranks_they_come_from_then_of_rows() -> None:
    for rank, (rows, loss_tokens) in enumerate([([3, 5, 0], 2 + 4), ([1, 0, 2], 0 + 0 + 1)]):
        num_real, of_rank, of_all, lengths = new_rows(SECTIONS, RANK_OF, LENGTHS, 3, rank)
        assert (num_real, of_rank, of_all) == (2 + rank, loss_tokens, 7)
        assert lengths.tolist() == [rows]


def test_parts_of_the_output_begin_aligned_and_have_the_bytes_of_all_rows() -> None:
    targets, bounds, output_data, output_bytes = output_parts(SECTIONS, np.array([[3, 5, 0]]))
    assert targets.tolist() == [0, 64]
    starts, ends = bounds.reshape(-1, 2).T
    assert starts.tolist() == [0, 0, 64, 80, 96]  # the buffer, then its parts
    assert (ends - starts).tolist() == [112, 8 * 8, 3 * 4, 3 * 4, 4 * 4]  # lengths, and one offset more
    assert (output_data, output_bytes) == (80, 112)


@pytest.mark.parametrize("rank", [0, 1])
def test_chunks_are_sent_in_the_order_of_ranks_and_the_own_one_stays_at_the_end(rank: int) -> None:
    other = 1 - rank
    send_bytes, chunk_starts, end = sent_chunks(SECTIONS, RANK_OF, LENGTHS, rank, False)
    to_other, own = CHUNKS[rank, other], CHUNKS[rank, rank]
    assert (send_bytes[other], send_bytes[rank]) == (sum(to_other), 0)
    assert chunk_starts[other].tolist() == [0, to_other[0]]
    assert chunk_starts[rank].tolist() == [sum(to_other), sum(to_other) + own[0]]
    assert end == sum(to_other) + sum(own)


def test_an_all_gather_sends_one_chunk_which_has_the_size_of_the_largest() -> None:
    sizes = [sent_chunks(SECTIONS, RANK_OF, LENGTHS, rank, True) for rank in range(2)]
    assert [send_bytes.tolist() for send_bytes, _, _ in sizes] == [[64 + 16]] * 2  # of rank 1: 7 values, 2 rows
    assert [end for _, _, end in sizes] == [64 + 16] * 2


# Source buffer (0: received, 1: uploaded), place in it, place in the output and bytes, by collective and rank.
COPIES = {
    (False, 0): [(1, 32, 0, 24), (1, 64, 64, 4), (0, 0, 24, 40), (0, 48, 68, 4)],
    (False, 1): [(0, 0, 0, 8), (0, 16, 32, 8), (1, 64, 8, 16), (1, 80, 40, 4)],
    # The chunk of rank 1 begins at 80, its rows at 144.
    (True, 0): [(0, 0, 0, 24), (0, 32, 64, 4), (0, 96, 24, 40), (0, 148, 68, 4)],
    (True, 1): [(0, 24, 0, 8), (0, 36, 32, 8), (0, 80, 8, 16), (0, 144, 40, 4)],
}


@pytest.mark.parametrize("sends_all", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_copies_fill_the_sections_of_the_output_without_a_gap(rank: int, sends_all: bool) -> None:
    lengths = new_rows(SECTIONS, RANK_OF, LENGTHS, 3, rank)[-1]
    targets = output_parts(SECTIONS, lengths)[0]
    first_targets = targets.copy()
    send_bytes, chunk_starts, _ = sent_chunks(SECTIONS, RANK_OF, LENGTHS, rank, sends_all)
    received, copies, num_copies = received_copies(
        SECTIONS, RANK_OF, LENGTHS, 3, rank, sends_all, send_bytes, chunk_starts, targets
    )
    other = 1 - rank
    expected = [80, 80] if sends_all else [sum(CHUNKS[other, rank]) * (source == other) for source in range(2)]
    assert received.tolist() == expected
    assert (targets - first_targets).tolist() == [8 * lengths.sum(), 4 * (2 + rank)]
    assert [*map(tuple, copies[:num_copies].tolist())] == COPIES[sends_all, rank]
    filled = sorted((target, target + size) for _, _, target, size in copies[:num_copies].tolist())
    for section, first in enumerate(first_targets.tolist()):
        of_section = [(start, end) for start, end in filled if first <= start < targets[section]]
        assert of_section[0][0] == first
        assert of_section[-1][1] == targets[section]
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(of_section))


def test_a_layout_has_what_the_host_knows_after_the_chunks_and_then_the_tiles() -> None:
    layout = lay_out(SECTIONS, RANK_OF, LENGTHS, 3, 0, False, 8192)
    assert layout.host_data == 16 + 16 + 32 + 16  # a chunk for rank 1, then its own
    assert layout.tiles == layout.host_data + 16 + 16 + 16  # lengths, offsets, a padding row
    assert layout.host_bytes == layout.tiles + 8 * layout.copies.size
    assert (layout.length_per_key.tolist(), layout.max_lengths.tolist()) == ([8], [5])
    # As int64: nothing, the values, the rest; as int32: values, dense rows, a gap, lengths, a gap, offsets, nothing.
    assert layout.views.tolist() == [0, 8, 6, 16, 3, 1, 3, 1, 4, 0]
    assert [copy for copy in layout.copies.tolist() if copy[1] >= layout.host_data] == [
        [1, layout.host_data, 80, 32],
        [1, layout.host_data + 32, 64 + 8, 4],
    ]


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
