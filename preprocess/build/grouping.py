"""The compiled loops that turn events into sequences; they run without the interpreter's lock."""

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled


@compiled
def _slot(key: int, mask: int) -> np.int64:
    # Fibonacci hashing (Knuth): the high bits of a product with 2^64 / golden ratio are well mixed.
    return np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(20)) & np.uint64(mask))


@compiled
def encode_users(user_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Number users in the order in which they first appear, by an open-addressing hash table.

    Args:
        user_ids: int64 [events].

    Returns:
        The different users, int64 [users], and each event's number among them, int32 [events].

    """
    capacity = 1 << 12
    table = np.full(capacity, -1, dtype=np.int32)
    users = np.empty(capacity, dtype=np.int64)
    codes = np.empty(len(user_ids), dtype=np.int32)
    count = 0
    for event in range(len(user_ids)):
        user = user_ids[event]
        if event > 0 and user == user_ids[event - 1]:  # many logs are grouped by user already
            codes[event] = codes[event - 1]
            continue
        slot = _slot(user, capacity - 1)
        while table[slot] >= 0 and users[table[slot]] != user:
            slot = (slot + 1) & (capacity - 1)
        if table[slot] < 0:
            table[slot] = count
            users[count] = user
            count += 1
            if 2 * count > capacity:
                capacity *= 2
                table = np.full(capacity, -1, dtype=np.int32)
                grown = np.empty(capacity, dtype=np.int64)
                grown[:count] = users[:count]
                users = grown
                for code in range(count):
                    slot = _slot(users[code], capacity - 1)
                    while table[slot] >= 0:
                        slot = (slot + 1) & (capacity - 1)
                    table[slot] = code
            codes[event] = count - 1
        else:
            codes[event] = table[slot]
    return users[:count].copy(), codes


@compiled
def order_events(
    codes: NDArray[np.int32], times: NDArray[np.int64], num_users: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Sort events by user, then by time; events of one user and one time stay in their order.

    Args:
        codes: int32 [events], each event's user, 0..num_users-1.
        times: int64 [events].
        num_users: how many there are.

    Returns:
        offsets, int64 [users + 1], and order, int32 [events]: user u's events, oldest first, are
        order[offsets[u] : offsets[u + 1]].

    """
    offsets = np.zeros(num_users + 1, dtype=np.int64)
    for code in codes:
        offsets[code + 1] += 1
    for user in range(num_users):
        offsets[user + 1] += offsets[user]
    order = np.empty(len(codes), dtype=np.int32)
    place = offsets[:-1].copy()
    for event in range(len(codes)):
        order[place[codes[event]]] = event
        place[codes[event]] += 1
    for user in range(num_users):
        begin, end = offsets[user], offsets[user + 1]
        for at in range(begin + 1, end):
            if times[order[at]] < times[order[at - 1]]:
                own = order[begin:end].copy()
                order[begin:end] = own[np.argsort(times[own], kind="mergesort")]
                break
    return offsets, order


@compiled
def count_duplicates(
    offsets: NDArray[np.int64],
    order: NDArray[np.int32],
    times: NDArray[np.int64],
    items: NDArray[np.int64],
    actions: NDArray[np.int64],
) -> int:
    """Count events that repeat another of the same user, time, item and action."""
    duplicates = 0
    for user in range(len(offsets) - 1):
        begin = offsets[user]
        while begin < offsets[user + 1]:
            end = begin + 1
            while end < offsets[user + 1] and times[order[end]] == times[order[begin]]:
                end += 1
            if end - begin > 1:
                # Sorted by item, then by action, so that equal ones are neighbours.
                own = order[begin:end].copy()
                own = own[np.argsort(actions[own], kind="mergesort")]
                own = own[np.argsort(items[own], kind="mergesort")]
                for at in range(1, len(own)):
                    a, b = own[at - 1], own[at]
                    if items[a] == items[b] and actions[a] == actions[b]:
                        duplicates += 1
            begin = end
    return duplicates


@compiled
def first_at_or_after(
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    order: NDArray[np.int32],
    times: NDArray[np.int64],
    boundary: int,
) -> NDArray[np.int64]:
    """Return, for each row, the place of its first event at or after a time; its end if there is none: int64 [rows]."""
    places = np.empty(len(begins), dtype=np.int64)
    for row in range(len(begins)):
        low, high = begins[row], ends[row]
        while low < high:
            middle = (low + high) // 2
            if times[order[middle]] < boundary:
                low = middle + 1
            else:
                high = middle
        places[row] = low
    return places


@compiled
def mark_items(
    seen: NDArray[np.bool_],
    items: NDArray[np.int64],
    order: NDArray[np.int32],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> None:
    """Set seen[item] for the items of all rows; `seen` has a place for each."""
    for row in range(len(begins)):
        for place in range(begins[row], ends[row]):
            seen[items[order[place]]] = True


@compiled
def gather(
    column: NDArray[np.int64], order: NDArray[np.int32], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Concatenate column[order[begins[i] : ends[i]]] over all rows i."""
    total = 0
    for row in range(len(begins)):
        total += ends[row] - begins[row]
    values = np.empty(total, dtype=column.dtype)
    at = 0
    for row in range(len(begins)):
        for place in range(begins[row], ends[row]):
            values[at] = column[order[place]]
            at += 1
    return values
