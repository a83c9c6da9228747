import numpy as np

from evenrank.preprocess.build.inference_requests import find_requests


def _requests(times: list[int], gap: int, day: int) -> list[tuple[int, int, int]]:
    columns = find_requests(np.array([0, len(times)]), np.array(times), gap, day)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_requests_are_made_at_the_first_event_and_then_a_gap_after_the_last_request() -> None:
    # 14 is only 4 after the request at 10, but 15 is 5 after it. The next gap is counted from 15.
    assert _requests([10, 14, 15, 19, 20], gap=5, day=0) == [(0, 10, 0), (0, 15, 2), (0, 20, 4)]


def test_requests_and_histories_of_each_day_are_separate() -> None:
    assert _requests([95, 98, 101, 103, 120], gap=10, day=100) == [(0, 95, 0), (0, 101, 0), (0, 120, 2)]


def test_requests_of_rows_are_independent() -> None:
    rows, times, ends = find_requests(np.array([0, 1, 1, 3]), np.array([7, 3, 9]), 5, 0)
    assert (rows.tolist(), times.tolist(), ends.tolist()) == ([0, 2, 2], [7, 3, 9], [0, 0, 1])
