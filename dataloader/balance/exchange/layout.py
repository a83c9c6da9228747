"""What one rank sends and receives in a step, to the byte: assignment and lengths -> buffers and copies.

Every rank knows the lengths of all samples, so it lays out its buffers without asking other ranks, and lengths are not
sent. What one rank sends to another is a chunk: for each section the samples that move, in ascending order of rows,
each section aligned to 16 bytes.

    host buffer      chunk to rank 0                              ...   own chunk   lengths, offsets, padding   tiles
                     [item_id 7 3 9 4 | action 1 1 0 2 | ids 5 8]
    output buffer    item_id of all new samples | action | ids | lengths, offsets

Samples that stay on their rank are in its own chunk, which is uploaded and not sent. New samples are in ascending order
of the ranks that they come from, then rows, so each section of a chunk is one range of the output buffer. An all-gather
sends one chunk of all samples to every rank, which keeps those that it trains.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled
from evenrank.dataloader.balance.exchange.device import ALIGNMENT, copy_bytes, count_tiles, write_tiles

_RECEIVED, _UPLOADED = 0, 1  # source buffers of copies


class Sections(NamedTuple):
    """The S sections of a schema, as arrays for compiled loops. T tensors, K jagged keys, J jagged fields, V views."""

    tensor: NDArray[np.int64]  # [S]: number of the tensor that it is a part of, ascending
    key: NDArray[np.int64]  # [S]: row of the lengths [K, B] that counts its elements; -1 for a dense field
    element_bytes: NDArray[np.int64]  # [S]: of one value or weight of a jagged key, or of one row of a dense field
    padding_starts: NDArray[np.int64]  # [S + 1]: where in `padding` its padding row begins; jagged keys have none
    padding: NDArray[np.uint8]  # the padding rows of dense fields
    jagged_fields: NDArray[np.int64]  # [J, 3]: its first key, its number of keys, and the bytes of a length
    views: NDArray[np.int64]  # [V, 3]: where it begins and ends, an index of `output_parts`, and bytes of an element
    loss_key: int  # row of the lengths that count loss tokens; -1: each sample is one
    loss_skip: int  # see `LossKey`


class Layout(NamedTuple):
    """The buffers of one rank in one step, in bytes. W ranks, B new rows of each; C chunks: W, or 1 with an all-gather.

    The rows that ranks have loaded are R of each, which may be of several batches.
    """

    num_real: int  # samples of this rank after the exchange; the next four as of `new_rows`
    loss_tokens: int  # of these samples
    world_loss_tokens: int  # of all ranks
    lengths: NDArray[np.int64]  # [K, B]: of its rows after the exchange; padding has zeros
    send_bytes: NDArray[np.int64]  # [C]: of each chunk that is sent; 0 for its own
    receive_bytes: NDArray[np.int64]  # [W]: of each chunk that is received
    chunk_starts: NDArray[np.int64]  # [C, S]: start of each section of each chunk in the host buffer
    host_data: int  # start of lengths, offsets and padding in the host buffer: the end of the chunks
    tiles: int  # start of the tiles in the host buffer
    host_bytes: int  # size of the host buffer
    views: NDArray[np.int64]  # [V]: elements of each view of the output buffer
    length_per_key: NDArray[np.int64]  # [K]: elements of each key after the exchange
    max_lengths: NDArray[np.int64]  # [K]: of its longest row
    output_bytes: int  # size of the output buffer
    copies: NDArray[np.int64]  # [n, 4]: see `device`; from the receive buffer (0) and the host buffer (1) to the output


@compiled
def lay_out(
    sections: Sections,
    rank_of: NDArray[np.int32],
    lengths: NDArray[np.int64],
    rows: tuple[int, int, int, NDArray[np.int64]],
    rank: int,
    sends_all: bool,
    tile_bytes: int,
) -> Layout:
    """Lay out a step, given who trains on each row, [W, R], -1 for none, and the lengths of all rows, [W, K, R].

    `rows` are `new_rows`, where padding may have been given lengths. With `sends_all` it is an all-gather. `tile_bytes`
    0: the host buffer has no tiles.
    """
    num_real, loss_tokens, world_loss_tokens, new_lengths = rows
    batch_size = new_lengths.shape[1]
    length_per_key, max_lengths = np.zeros((2, len(new_lengths)), dtype=np.int64)
    for key in range(len(new_lengths)):
        length_per_key[key], max_lengths[key] = new_lengths[key].sum(), new_lengths[key].max()
    targets, bounds, output_data, output_bytes = output_parts(sections, new_lengths)
    views = np.empty(len(sections.views), dtype=np.int64)
    for view in range(len(views)):
        begin, end, element_bytes = sections.views[view]
        views[view] = (bounds[end] - bounds[begin]) // element_bytes
    send_bytes, chunk_starts, host_data = sent_chunks(sections, rank_of, lengths, rank, sends_all)
    receive_bytes, copies, num_copies = received_copies(
        sections, rank_of, lengths, batch_size, rank, sends_all, send_bytes, chunk_starts, targets
    )

    # What the host knows about the new batch: lengths and offsets, and its padding rows.
    end = host_data + output_bytes - output_data
    copies[num_copies] = (_UPLOADED, host_data, output_data, output_bytes - output_data)
    num_copies += 1
    for section in range(len(sections.key)):
        num_bytes = 0
        for row in range(num_real, batch_size):
            num_bytes += _row_bytes(sections, section, new_lengths, row)
        if num_bytes:
            copies[num_copies] = (_UPLOADED, end, targets[section], num_bytes)
            num_copies += 1
            end += _aligned(num_bytes)
    tiles = end
    if tile_bytes:
        end += count_tiles(copies[:num_copies], tile_bytes) * 8 * copies.shape[1]
    return Layout(
        num_real,
        loss_tokens,
        world_loss_tokens,
        new_lengths,
        send_bytes,
        receive_bytes,
        chunk_starts,
        host_data,
        tiles,
        end,
        views,
        length_per_key,
        max_lengths,
        output_bytes,
        copies[:num_copies].copy(),
    )


@compiled
def new_rows(
    sections: Sections, rank_of: NDArray[np.int32], lengths: NDArray[np.int64], batch_size: int, rank: int
) -> tuple[int, int, int, NDArray[np.int64]]:
    """Return the samples of a rank after the exchange, their loss tokens, those of all ranks, and the lengths, [K, B].

    `batch_size` is B; R may be another one. The other arguments are those of `lay_out`, as of the next three.
    """
    world_size, num_rows = rank_of.shape
    num_real, new_lengths = 0, np.zeros((lengths.shape[1], batch_size), dtype=np.int64)
    loss_tokens = world_loss_tokens = 0
    for source in range(world_size):
        for row in range(num_rows):
            if rank_of[source, row] < 0:
                continue
            tokens = 1
            if sections.loss_key >= 0:
                tokens = max(lengths[source, sections.loss_key, row] - sections.loss_skip, 0)
            world_loss_tokens += tokens
            if rank_of[source, row] == rank:
                new_lengths[:, num_real] = lengths[source, :, row]
                num_real += 1
                loss_tokens += tokens
    return num_real, loss_tokens, world_loss_tokens, new_lengths


@compiled
def output_parts(
    sections: Sections, new_lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]:
    """Lay out the output buffer, given the lengths of the new rows, [K, B].

    Returns where each section begins, [S]; where the buffer, each of the T tensors, and the lengths and offsets of each
    jagged field begin and end: one after the other, in an array that may be longer; where lengths and offsets begin,
    and the bytes of the buffer.
    """
    bounds = np.zeros(2 * (1 + len(sections.key) + 2 * len(sections.jagged_fields)), dtype=np.int64)
    num_bounds = 2
    targets = np.zeros(len(sections.key), dtype=np.int64)
    end = 0
    for section in range(len(sections.key)):
        if section == 0 or sections.tensor[section] != sections.tensor[section - 1]:
            end = _aligned(end)
            bounds[num_bounds] = end
            num_bounds += 2
        targets[section] = end
        for row in range(new_lengths.shape[1]):
            end += _row_bytes(sections, section, new_lengths, row)
        bounds[num_bounds - 1] = end
    output_data = end = _aligned(end)
    for i in range(len(sections.jagged_fields)):
        _, num_keys, length_bytes = sections.jagged_fields[i]
        for num_lengths in (num_keys * new_lengths.shape[1], num_keys * new_lengths.shape[1] + 1):
            bounds[num_bounds], bounds[num_bounds + 1] = end, end + num_lengths * length_bytes
            end = _aligned(bounds[num_bounds + 1])
            num_bounds += 2
    bounds[1] = end
    return targets, bounds, output_data, end


@compiled
def sent_chunks(
    sections: Sections, rank_of: NDArray[np.int32], lengths: NDArray[np.int64], rank: int, sends_all: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Lay out the chunks that a rank sends, its own last.

    Returns `send_bytes` and `chunk_starts`, see `Layout`, and the end of the chunks.
    """
    (world_size, num_rows), num_sections = rank_of.shape, len(sections.key)
    num_chunks = 1 if sends_all else world_size
    sent = np.zeros((num_chunks, num_sections), dtype=np.int64)
    for row in range(num_rows):
        if rank_of[rank, row] >= 0:
            for section in range(num_sections):
                chunk = 0 if sends_all else rank_of[rank, row]
                sent[chunk, section] += _row_bytes(sections, section, lengths[rank], row)
    send_bytes = np.zeros(num_chunks, dtype=np.int64)
    chunk_starts = np.zeros((num_chunks, num_sections), dtype=np.int64)
    end = 0
    for index in range(num_chunks):
        chunk = index
        if not sends_all and index >= rank:
            chunk = rank if index == num_chunks - 1 else index + 1
        start = end
        for section in range(num_sections):
            chunk_starts[chunk, section] = end
            end += _aligned(sent[chunk, section])
        if sends_all or chunk != rank:
            send_bytes[chunk] = end - start
    if sends_all:  # all chunks of an all-gather have one size
        for source in range(world_size):
            end = max(end, _chunk_bytes(sections, lengths[source], rank_of[source]))
        send_bytes[0] = end
    return send_bytes, chunk_starts, end


@compiled
def received_copies(
    sections: Sections,
    rank_of: NDArray[np.int32],
    lengths: NDArray[np.int64],
    batch_size: int,
    rank: int,
    sends_all: bool,
    send_bytes: NDArray[np.int64],
    chunk_starts: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Lay out the chunks that a rank receives, and the copies of its new samples to the output buffer.

    `targets`, [S], is where the next sample of each section goes, and changes in place. Returns `receive_bytes`, see
    `Layout`; the copies, [n, 4], with room for those of what the host knows; and their number.
    """
    (world_size, num_rows), num_sections = rank_of.shape, len(sections.key)
    receive_bytes = np.zeros(world_size, dtype=np.int64)
    max_copies = (batch_size if sends_all else world_size) * num_sections + num_sections + 1
    copies = np.empty((max_copies, 4), dtype=np.int64)
    num_copies, received = 0, 0
    for source in range(world_size):
        chunk_start = received
        is_own = source == rank and not sends_all
        for section in range(num_sections):
            start = position = chunk_starts[rank, section] if is_own else received
            for row in range(num_rows):
                trained_by = rank_of[source, row]
                if trained_by < 0 or (trained_by != rank and not sends_all):
                    continue
                num_bytes = _row_bytes(sections, section, lengths[source], row)
                if trained_by == rank and num_bytes:
                    last = num_copies - 1
                    if num_copies and position > start and copies[last, 1] + copies[last, 3] == position:
                        copies[last, 3] += num_bytes
                    else:
                        buffer = _UPLOADED if is_own else _RECEIVED
                        copies[num_copies] = (buffer, position, targets[section], num_bytes)
                        num_copies += 1
                    targets[section] += num_bytes
                position += num_bytes
            if not is_own:
                received += _aligned(position - start)
        if sends_all:
            received = chunk_start + send_bytes[0]
        receive_bytes[source] = received - chunk_start
    return receive_bytes, copies, num_copies


@compiled
def write_host_buffer(
    layout: Layout,
    sections: Sections,
    tensors: NDArray[np.int64],
    lengths: NDArray[np.int64],
    trained_by: NDArray[np.int32],
    tile_bytes: int,
    buffer: NDArray[np.uint8],
) -> None:
    """Fill the host buffer, uint8 [host_bytes], given the addresses of the T tensors of a rank's batches, [batches, T].

    The lengths, [K, rows], and who trains on each row, [rows], are those of this rank before the exchange: equally many
    rows of each batch, one batch after the other.
    """
    address, next_sample = buffer.ctypes.data, layout.chunk_starts.copy()
    sends_all, rows_per_batch = len(next_sample) == 1, len(trained_by) // len(tensors)
    source = 0
    for batch in range(len(tensors)):
        for section in range(len(sections.key)):
            if section == 0 or sections.tensor[section] != sections.tensor[section - 1]:
                source = tensors[batch, sections.tensor[section]]
            for row in range(batch * rows_per_batch, (batch + 1) * rows_per_batch):
                num_bytes = _row_bytes(sections, section, lengths, row)
                if trained_by[row] >= 0:
                    chunk = 0 if sends_all else trained_by[row]
                    copy_bytes(address + next_sample[chunk, section], source, num_bytes)
                    next_sample[chunk, section] += num_bytes
                source += num_bytes

    end = layout.host_data
    for i in range(len(sections.jagged_fields)):
        first_key, num_keys, length_bytes = sections.jagged_fields[i]
        flat = layout.lengths[first_key : first_key + num_keys].reshape(-1)
        size = _aligned(len(flat) * length_bytes)
        start, end = end, end + size + _aligned((len(flat) + 1) * length_bytes)
        if length_bytes == 4:
            _write_lengths(flat, buffer[start:end].view(np.int32), size // 4)
        else:
            _write_lengths(flat, buffer[start:end].view(np.int64), size // 8)
    for section in range(len(sections.key)):
        start = end
        padding = sections.padding[sections.padding_starts[section] : sections.padding_starts[section + 1]]
        for row in range(layout.num_real, layout.lengths.shape[1]):
            num_bytes = _row_bytes(sections, section, layout.lengths, row)
            if sections.key[section] < 0:
                buffer[start : start + num_bytes] = padding
            else:
                buffer[start : start + num_bytes] = 0
            start += num_bytes
        end += _aligned(start - end)
    if tile_bytes:
        write_tiles(layout.copies, tile_bytes, buffer[layout.tiles : layout.host_bytes].view(np.int64).reshape(-1, 4))


@compiled
def _write_lengths(lengths: NDArray[np.int64], to: NDArray[np.integer[Any]], first_offset: int) -> None:
    """Write lengths, and from an index on their offsets."""
    offset = 0
    for i in range(len(lengths)):
        to[i] = lengths[i]
        to[first_offset + i] = offset
        offset += lengths[i]
    to[first_offset + len(lengths)] = offset


@compiled
def _chunk_bytes(sections: Sections, lengths: NDArray[np.int64], trained_by: NDArray[np.int32]) -> int:
    """Return the bytes of all samples of a rank, given the lengths of its rows, [K, B], and who trains on them, [B]."""
    total = 0
    for section in range(len(sections.key)):
        num_bytes = 0
        for row in range(len(trained_by)):
            if trained_by[row] >= 0:
                num_bytes += _row_bytes(sections, section, lengths, row)
        total += _aligned(num_bytes)
    return total


@compiled
def _row_bytes(sections: Sections, section: int, lengths: NDArray[np.int64], row: int) -> int:
    key = sections.key[section]
    return int(sections.element_bytes[section] * (1 if key < 0 else lengths[key, row]))


@compiled
def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
