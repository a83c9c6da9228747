import threading

import numpy as np
from numpy.typing import NDArray

from evenrank.core.compiled import compiled


@compiled
def _spin(flag: NDArray[np.int64], turns: NDArray[np.int64], max_turns: int) -> bool:
    """Count turns until another thread sets the flag; False if that does not happen within `max_turns`."""
    while turns[0] < max_turns:
        turns[0] += 1  # a store, so that the compiler loads the flag again in each turn
        if flag[0] != 0:
            return True
    return False


def test_a_compiled_function_releases_the_gil() -> None:
    flag, turns = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    assert not _spin(flag, turns, 1)
    was_set: list[bool] = []
    # A thread that held the GIL would keep this one from setting the flag, and use up all its turns.
    spinning = threading.Thread(target=lambda: was_set.append(_spin(flag, turns, 10_000_000_000)))
    spinning.start()
    while turns[0] < 1000 and spinning.is_alive():
        pass
    flag[0] = 1
    spinning.join()
    assert was_set == [True]


def test_a_compiled_function_keeps_its_name_and_documentation() -> None:
    assert _spin.__name__ == "_spin"
    assert (_spin.__doc__ or "").startswith("Count turns")
