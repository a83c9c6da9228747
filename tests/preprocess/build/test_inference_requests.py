import numpy as np

from evenrank.preprocess.build.inference_requests import find_requests


def test_requests_are_made_at_the_first_event_and_then_a_gap_after_the_last_request_of_each_row_and_day() -> None:
    def requests(offsets: list[int], times: list[int], gap: int, day: int) -> list[tuple[int, int, int]]:
        columns = find_requests(np.array(offsets), np.array(times), gap, day)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    # 14 is only 4 after the request at 10, but 15 is 5 after it. The next gap is counted from 15.
    assert requests([0, 5], [10, 14, 15, 19, 20], gap=5, day=0) == [(0, 10, 0), (0, 15, 2), (0, 20, 4)]
    assert requests([0, 5], [95, 98, 101, 103, 120], gap=10, day=100) == [(0, 95, 0), (0, 101, 0), (0, 120, 2)]
    assert requests([0, 1, 1, 3], [7, 3, 9], gap=5, day=0) == [(0, 7, 0), (2, 3, 0), (2, 9, 1)]
