"""`merge_stream_states`, and the format of the states of streams: the position in each shard of a rank."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from evenrank.core.errors import StateError
from evenrank.dataloader.routing.dist_type import DIST_TYPE
from evenrank.dataloader.state import checks
from evenrank.dataloader.state.checks import COUNT, check_intact, check_value, checksum, integer, show
from evenrank.dataloader.stream.shuffle import ShardPosition
from evenrank.datasets.stream import Shard

POSITIONS_KEY = "places"  # part of the format of saved states
FORMAT = checks.StateFormat(
    owner="the stream",
    version=2,
    fields={
        "epoch": checks.EPOCH,
        "position": integer(0, 1 << 62),  # to which an epoch's steps are added
        "seed": checks.SEED,
        "num_shards": COUNT,
        "fingerprint": checks.TEXT,
        POSITIONS_KEY: checks.MAPPING,
        DIST_TYPE: checks.TEXT,
    },
    # Positions of all ranks are merged, so each has a checksum of its own; dist_type is compared with the job's.
    not_covered=frozenset({POSITIONS_KEY, DIST_TYPE}),
)


def merge_stream_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks after one step into the state of all shards, loadable on any number of ranks.

    Raises:
        StateError: the states are of different steps or streams, or the state of a rank is missing.
    """
    if not states:
        raise StateError("there are no states to merge; pass those of all ranks")
    states = [FORMAT.check(state) for state in states]
    merged = states[0]
    shard_positions: dict[int, ShardPosition] = {}
    for index, state in enumerate(states):
        for name in ("epoch", "position", "seed", "num_shards", "fingerprint", DIST_TYPE):
            if state[name] != merged[name]:
                raise StateError(
                    f"states 0 and {index} cannot be merged: {name} is {merged[name]!r} and {state[name]!r}; save "
                    "the states of all ranks after the same step"
                )
        for shard, position in decode_positions(state, merged["num_shards"]).items():
            if shard_positions.setdefault(shard, position) != position:
                raise StateError(
                    f"states cannot be merged: state {index} has position {list(position)} in shard {shard}, an "
                    f"earlier one {list(shard_positions[shard])}; pass one state of each rank, after the same step"
                )
    check_complete(shard_positions, merged["num_shards"])
    return {**merged, POSITIONS_KEY: {name: entry for state in states for name, entry in state[POSITIONS_KEY].items()}}


def encode_positions(
    shard_positions: Mapping[int, ShardPosition], *, fingerprint: str, epoch: int
) -> dict[str, list[int | str]]:
    """Return positions by shard as they are saved: windows done, samples taken, checksum."""
    return {
        str(index): [*position, checksum(fingerprint, epoch, index, *position)]
        for index, position in sorted(shard_positions.items())
    }


def decode_positions(state: Mapping[str, Any], num_shards: int) -> dict[int, ShardPosition]:
    """Return the positions of a state by index of the shard, 0..num_shards-1; a damaged one raises StateError."""
    shard_positions: dict[int, ShardPosition] = {}
    for name, entry in state[POSITIONS_KEY].items():
        is_index = isinstance(name, str) and re.fullmatch("0|[1-9][0-9]{0,17}", name) and int(name) < num_shards
        if not is_index or not isinstance(entry, list | tuple) or len(entry) != 3:
            raise StateError(
                f"the state of the stream has position {show(entry)} in shard {show(name)}, expected two integers and "
                f"a checksum in one of {num_shards} shards; load a state that state_dict returned"
            )
        has = f"the state of the stream has, in the position in shard {name},"
        for value in entry[:2]:
            check_value(value, has, COUNT)
        position = ShardPosition(*entry[:2])
        expected = checksum(state["fingerprint"], state["epoch"], int(name), *position)
        check_intact(entry[2] == expected, f"the position in shard {name} of the state of the stream")
        shard_positions[int(name)] = position
    return shard_positions


def check_position(position: ShardPosition, shard: Shard, *, seed: int, epoch: int) -> None:
    """Raise a StateError if a position is beyond the end of its shard or window."""
    has = f"the state of the stream has, in shard {shard.index},"
    check_value(position.windows_done, f"{has} windows_done", integer(0, shard.num_windows))
    is_end = position.windows_done == shard.num_windows
    num_rows = 1 if is_end else shard.window_rows(position.windows_done, seed=seed, epoch=epoch)
    check_value(position.samples_taken, f"{has} samples_taken", integer(0, num_rows - 1))


def check_complete(shard_positions: Mapping[int, ShardPosition], num_shards: int) -> None:
    """Raise a StateError if the position in a shard is missing."""
    if len(shard_positions) < num_shards:
        first = next(index for index in itertools.count() if index not in shard_positions)
        raise StateError(
            f"the state lacks {num_shards - len(shard_positions)} of {num_shards} shards, among them shard {first}; "
            "merge the states of all ranks with merge_stream_states"
        )
