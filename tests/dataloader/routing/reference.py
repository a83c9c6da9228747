"""What routing is, in Python's integers and lists; and batches to compare it on."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from evenrank.dataloader.routing import MODES, Mode, Routing

WORD = (1 << 64) - 1

# Around everything that can go wrong with signs and widths.
EDGES = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, -1, -2, -(2**31), -(2**32), -(2**63))


def keys_of(bits: int) -> st.SearchStrategy[int]:
    limit = 1 << (bits - 1)
    edges = st.sampled_from([edge for edge in EDGES if -limit <= edge < limit])
    return st.one_of(st.integers(0, 99), st.integers(-limit, limit - 1), edges)


def hash_word(word: int) -> int:
    """The finalizer, with a mask after each multiplication."""
    word ^= word >> 33
    word = word * 0xFF51AFD7ED558CCD & WORD
    word ^= word >> 33
    word = word * 0xC4CEB9FE1A85EC53 & WORD
    return word ^ word >> 33


def owner_and_row(key: int, world_size: int, routing: Routing, bits: int = 64) -> tuple[int, int]:
    """Return the rank that owns a key and its row there, as an unsigned word of 64 bits."""
    word = key & WORD
    if routing.mode == "hash_roundrobin":
        return hash_word(word) % world_size, word
    if routing.mode == "continuous":
        word = key & (1 << bits) - 1
        assert routing.num_embeddings
        block = (routing.num_embeddings + world_size - 1) // world_size
        if word < block * world_size:
            return word // block, word % block
    return word % world_size, word // world_size


def signed(word: int, bits: int) -> int:
    """Return the lowest bits of a word as a signed integer."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of keys of each feature, [K][B][...]."""

    rows: list[list[list[int]]]
    routings: tuple[Routing, ...]
    world_size: int
    bits: int = 64

    @property
    def keys(self) -> list[int]:
        return [key for feature in self.rows for row in feature for key in row]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for feature in self.rows for row in feature]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A batch grouped by rank."""

    lengths: list[int]
    values: list[int]
    sources: list[int]
    """Index of each value in the batch."""
    positions: list[int]
    """Index of each value in its row."""

    @property
    def permutation(self) -> list[int]:
        places = [0] * len(self.sources)
        for place, source in enumerate(self.sources):
            places[source] = place
        return places


def bucketized(batch: Batch) -> Expected:
    groups: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    source = 0
    for feature, (rows, routing) in enumerate(zip(batch.rows, batch.routings, strict=True)):
        for number, row in enumerate(rows):
            for position, key in enumerate(row):
                owner, value = owner_and_row(key, batch.world_size, routing, batch.bits)
                groups.setdefault((owner, feature, number), []).append((signed(value, batch.bits), source, position))
                source += 1
    stride = len(batch.rows[0]) if batch.rows else 0
    ordered = [
        groups.get((rank, feature, number), [])
        for rank in range(batch.world_size)
        for feature in range(len(batch.rows))
        for number in range(stride)
    ]
    flat = [entry for group in ordered for entry in group]
    values, sources, positions = (list(column) for column in zip(*flat, strict=True)) if flat else ([], [], [])
    return Expected(lengths=[len(group) for group in ordered], values=values, sources=sources, positions=positions)


@st.composite
def batches(draw: st.DrawFn, modes: Sequence[Mode] = MODES, max_length: int = 5) -> Batch:
    """Draw a batch of up to 4 features and 5 rows; `max_length` is of most rows, others have 150 keys."""
    bits: int = draw(st.sampled_from((32, 64)))
    num_features, stride = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    long = st.integers(0, 2**30).map(lambda first: list(range(first, first + 150 * 7, 7)))
    row: st.SearchStrategy[list[int]] = st.one_of(st.lists(keys_of(bits), max_size=max_length), st.just([]), long)
    rows = st.lists(row, min_size=stride, max_size=stride)
    routing = st.builds(
        Routing, mode=st.sampled_from(modes), num_embeddings=st.one_of(st.integers(1, 99), st.integers(1, 2**40))
    )
    return Batch(
        rows=draw(st.lists(rows, min_size=num_features, max_size=num_features)),
        routings=tuple(draw(st.lists(routing, min_size=num_features, max_size=num_features))),
        world_size=draw(st.integers(1, 64)),
        bits=bits,
    )
