"""Law 5: an error on one rank is the same line on all of them, long before the timeout."""

from pathlib import Path

import pytest

from tests.laws.kinds import ALONE, BALANCED, cells, has
from tests.laws.making import Job
from tests.laws.running import failure_of
from tests.ranks import RankPool

FAULTS = {
    "seed": "seed differs between ranks: 0 on rank 0, 1 on rank 1",
    "cost": "the cost is not known",
    "read": "a file cannot be read",
}
# Ranks that wait for the end of an epoch look for errors once a second, so some of these cases are enough.
_SLOW = {(kind, way, fault) for kind, way in cells("packed", "window") for fault in ("cost", "read")}
_SLOW -= {("shuffle", "packed", "cost"), ("windows of time", "window", "cost"), ("elastic", "window", "read")}
CASES = [
    (kind, way, fault)
    for kind, way in cells(*ALONE[1:], *BALANCED)
    for fault in FAULTS
    if has(kind, fault) and has(kind, f"{way} {fault}") and (kind, way, fault) not in _SLOW
]


@pytest.mark.parametrize(("kind", "way", "fault"), CASES)
def test_an_error_on_one_rank_is_the_same_line_on_all(
    ranks: RankPool, data: Path, kind: str, way: str, fault: str
) -> None:
    """A rank that only waited would have another one: that the others were lost, or did not answer in time."""
    job = Job(kind=kind, way=way, batch_size=1, prefetch=1, fault=fault)
    lines = ranks.run(3, failure_of, data, job)
    assert {line.removeprefix("rank 1 failed: ") for line in lines} == {FAULTS[fault]}
