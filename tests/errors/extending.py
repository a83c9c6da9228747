"""What an order that users write themselves may not do."""

from typing import Any

import numpy as np

from evenrank.core.errors import ConfigError, StateError
from evenrank.datasets import ORDERS, Order, SampleOrder, open_store, register_order
from tests.errors.scene import Row, Scene
from tests.registrations import restored


class _Listed(SampleOrder):
    def __init__(self, rows: Any, num_samples: Any) -> None:
        self.listed, self.num_samples = rows, num_samples

    def rows(self, positions: Any, *, seed: int, epoch: int) -> Any:
        return self.listed[positions + epoch]


class _Mine(Order):
    """Rows that are given, from the one with the epoch's number on."""

    def __init__(self, rows: Any, num_samples: Any = None) -> None:
        self._rows, self._num_samples = np.asarray(rows), len(rows) if num_samples is None else num_samples

    def arrange(self, stores: Any, samples: Any) -> _Listed:
        return _Listed(self._rows, self._num_samples)


def _load(scene: Scene, order: Any, **options: Any) -> Any:
    from evenrank.dataloader import LoaderConfig, build_loader

    config = LoaderConfig(**{"batch_size": 3, "order": order, **options})
    return build_loader(scene.data, config, rank=0, world_size=1)


def _second_epoch(scene: Scene) -> None:
    loader = _load(scene, _Mine([0, 1, 2, 3, 99_999], 4))
    assert sorted(id for batch in loader for id in batch.sample_ids[: batch.num_real].tolist()) == [0, 1, 2, 3]
    list(loader)


def _too_short(scene: Scene) -> None:
    _load(scene, _Mine([int(np.argmin(open_store(scene.data).lengths))]), max_num_candidates=3)


def _register(name: str, order: Any) -> None:
    with restored(ORDERS):
        register_order("known")(_Mine(range(3)))
        register_order(name)(order)


def mine(rows: Any, line: str, num_samples: Any = None) -> Row:
    return Row(lambda scene: _load(scene, _Mine(rows, num_samples)), ConfigError, line)


def state_of_another(other: Any) -> Row:
    def load(scene: Scene) -> None:
        state = _load(scene, _Mine(range(50))).state_dict()
        _load(scene, _Mine(range(50))).load_state_dict(state)
        _load(scene, other).load_state_dict(state)

    return Row(load, StateError, "the loader's state is of other data, codes or filters...")


MINE, INTEGERS = "the order _Mine() ", "the order _Mine() must return integers of shape"
ROWS = [
    mine([0, 2, 1, 2], f"{MINE}has row 2 at position 3 of epoch 0, ..."),
    mine([0, 198], f"{MINE}has row 198 at position 1 of epoch 0, ..."),
    mine(np.arange(2, dtype=np.uint64) - 1, f"{MINE}has row -1 at position 0 of epoch 0..."),
    mine([0.0, 1.0], f"{INTEGERS} (2,), got float64..."),
    mine(np.zeros((3, 1), dtype=np.int64), f"{INTEGERS} (3,), got int64 of shape (3, 1)..."),
    mine([0, 1], f"num_samples of {MINE}must be of type int, got 2.5...", 2.5),
    mine([0, 1], f"num_samples of {MINE}must be at least 0, got -1...", -1),
    Row(_too_short, ConfigError, f"{MINE}has row ... at position 0 of epoch 0, which is none of the samples in 0..."),
    Row(_second_epoch, ConfigError, f"{MINE}has row 99999 at position 3 of epoch 1, which is none of the samples..."),
    *map(state_of_another, (_Mine(range(49, -1, -1)), _Mine(range(50), 40), "rows")),
    Row(lambda _: _register("shuffle", _Mine), ConfigError, "...cannot register the order 'shuffle', which evenr..."),
    Row(lambda _: _register("other", _load), ConfigError, "the order 'other' must be an Order, or a class of them,..."),
    Row(lambda s: _load(s, "mine"), ConfigError, "LoaderConfig: order must be one of rows, shuffle, got 'mine'..."),
]
