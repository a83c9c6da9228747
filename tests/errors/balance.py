import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from evenrank.core.errors import ConfigError, DataError, MissingPackageError, RankError
from evenrank.dataloader import balance
from evenrank.dataloader.balance import BalanceConfig, Balancer, LinearCost, MeasuredCost, PaddedCost, partition
from evenrank.dataloader.balance.costs.cost import count_tokens, scaled_costs
from evenrank.datasets.distributions import Lognormal
from tests.errors.scene import Row, Scene
from tests.registrations import restored

LINEAR = LinearCost(interleave_actions=False)
PACK: dict[str, Any] = {"pack": True, "max_tokens_per_rank": 9}
COMPARE = "compare_every=4 needs the same samples in each step; leave it out, or window and max_tokens_per_rank, ..."


def call(function: Callable[..., Any], options: dict[str, Any], scene: Scene) -> Any:
    return function(**options)


def check(exchanges: bool = True, **options: Any) -> None:
    from evenrank.training import StepTimer

    on_step = {"on_step": StepTimer()} if "refit_every" in options else {}
    BalanceConfig(**{"cost": LINEAR, **on_step, **options}).check(exchanges=exchanges)


def from_dict(options: dict[str, Any]) -> BalanceConfig:
    with restored(balance.COSTS):
        balance.register_cost("ones")(cost_of([1]))
        return BalanceConfig.from_dict(options)


def cost_of(returned: Any = None, raises: str = "") -> Callable[..., Any]:
    """Return a cost of two samples, which fails or returns this."""

    def cost(lengths: Any, candidates: Any) -> Any:
        return lengths[raises] if raises else np.array(returned)

    return cost


def without_group(scene: Scene) -> Any:
    from evenrank.dataloader import LoaderConfig, build_loader
    from evenrank.training import StepTimer

    refitted = BalanceConfig(cost=LINEAR, on_step=StepTimer(), refit_every=5)
    return build_loader(scene.data, LoaderConfig(batch_size=32), rank=0, world_size=2, balance=refitted)


def without_tensorboard(scene: Scene) -> None:
    names = {name for name in sys.modules if name.startswith("torch.utils.tensorboard")}
    with patch.dict(sys.modules, dict.fromkeys({"tensorboard"} | names)):
        for name in names:
            del sys.modules[name]
        write(scene, writer="TensorBoard")


def scaled(cost: Any, num_candidates: tuple[int, int] = (0, 0), **lengths: list[int]) -> Any:
    keys = {key: np.array(values) for key, values in ({"item_id": [5, 0], **lengths}).items()}
    return scaled_costs(cost, keys, np.array(num_candidates), samples_per_step=8)


def tokens(returned: list[int]) -> Any:
    cost = type("Counting", (), {"tokens": lambda self, lengths: np.array(returned)})()
    return count_tokens(cost, {"item_id": np.array([5, 0])}, 2)


def fit(change: Callable[..., tuple[Any, ...]]) -> MeasuredCost:
    """Fit a cost to changed lengths, times and, if any, candidates of the steps 0 to 199."""
    good = Lognormal(mean=512, std=512).sample(np.random.default_rng(0), 3200).reshape(200, 16)
    lengths, seconds, *candidates = change(good, seconds_of(good), np.arange(200))
    return MeasuredCost.fit(
        lengths, seconds, candidates=candidates[0] if candidates else None, interleave_actions=False
    )


def seconds_of(lengths: Any) -> Any:
    exact = lengths.astype(float)
    return 0.004 + 3e-7 * exact.sum(axis=1) + 2e-10 * (exact**2).sum(axis=1)


def same(lengths: Any) -> tuple[Any, Any]:
    return lengths, seconds_of(lengths)


def load(scene: Scene, **changes: Any) -> MeasuredCost:
    """Load the file of a cost with other values; ...: without that one."""
    cost = MeasuredCost(
        linear=700, quadratic=11, fraction_bits=40, seconds_per_step=0.004, steps=9, r2=0.9, interleave_actions=True
    )
    values = {**json.loads(cost.to_text()), **changes}
    text = json.dumps({name: value for name, value in values.items() if value is not ...})
    return MeasuredCost.load(scene.file("cost.json", text))


def split(strategy: Any = "lpt-swap", **options: Any) -> Any:
    """Partition by a strategy, or by one that returns what is given."""
    with restored(balance.STRATEGIES):
        if not isinstance(strategy, str):
            returned, strategy = strategy, "mine"
            balance.register_strategy(strategy)(lambda _: returned)
        return partition(**{"costs": np.arange(6), "world_size": 2, "strategy": strategy, **options})


def sample() -> Any:
    from tests.dataloader.batch_helpers import COLLATE

    return COLLATE([{"item_id": [1, 2, 3], "sample_ids": 3}])


def balanced(batches: Any, device: Any = None) -> Any:
    return Balancer(batches, BalanceConfig(cost=LINEAR), device=device)


def train(*batches: Any) -> None:
    with balanced(batches) as balancer:
        list(balancer)


def data_loader() -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.ones(2)))


def write(scene: Scene, name: str = "log", writer: str = "JsonLines", **options: Any) -> None:
    from evenrank.dataloader.balance.metrics import writers

    (scene.folder / "folder").mkdir()
    scene.file("file", "")
    getattr(writers, writer)(name if "://" in name else scene.folder / name, **options)


def read_log(scene: Scene, name: str) -> None:
    from evenrank.dataloader.balance.metrics.log import read_json_lines

    scene.file("text", '{"epoch": 0, "st')
    read_json_lines(scene.folder / name)


NO_BATCH = "rank 0 failed: the loader yields a {} instead of a JaggedBatch; pass its DataLoader collate..."
NO_STATE = "the loader, a DataLoader, has no state_dict and load_state_dict; use torchdata's StatefulDataLoader, ..."

NOT_BATCHES = "batches must be an iterable of JaggedBatches, such as a loader; got a {}..."
ALIKE = "the samples' lengths are too similar: tokens explain all but 0.00% of their attended pairs, at least 0.1% ..."
EXCEEDED: Any = {"costs": np.array([5, 5, 1, 1]), "tokens": np.array([5, 5, 1, 1]), "max_tokens_per_rank": 5}
SIMILAR = (
    "the timed steps are too similar: their tokens vary by 0.0%, at least 2% is needed; time steps that are neither ..."
)
COST = "the cost cost_of.<locals>.cost"
SHAPE: Any = {"hidden": 1024, "heads": 2, "head_dim": 256, "layers": 8}
LONG = balance.HSTUCost(**SHAPE, interleave_actions=False)
PADDED = PaddedCost(LINEAR)
HALF: Any = {"name": "linear", "interleave_actions": True}

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "best"}, "BalanceConfig: strategy must be one of none, ..., got 'best'"),
    ({"on_overflow": "skip"}, "BalanceConfig: on_overflow must be one of raise, warn, got 'skip'"),
    ({"log_every": 1, "log_window": (5, 5)}, "log_window must be (start, stop) with 0 <= start < stop, got (5, 5)"),
    ({"log_window": (2, 5)}, "BalanceConfig: log_window=(2, 5) has no effect without log_every; give both, ..."),
    ({"cost": "hstu"}, "BalanceConfig: cost must be of type Cost, got 'hstu'"),
    ({"timeout": timedelta()}, "BalanceConfig: timeout must be above 0:00:00, got 0:00:00"),
    ({"compare_every": 1}, "BalanceConfig: compare_every must be at least 2, got 1"),
    ({"compare_every": 4, "max_tokens_per_rank": 9}, COMPARE),
    ({"compare_every": 4, "window": 2, "exchanges": False}, COMPARE),
    ({"cost": PADDED, "max_tokens_per_rank": 9}, "max_tokens_per_rank = 9 limits sums of tokens, but a PaddedCost ..."),
    ({"window": 9}, "a Balancer has windows of at most 8 steps, whose metadata it gathers at once, got window=9; ..."),
    ({"lookahead": 3, "exchanges": False}, "BalanceConfig: lookahead=3 is an option of Balancer, not of ..."),
    ({"window": 2, "strategy": "none"}, "window=2 needs a strategy that assigns samples to ranks, got 'none'; ..."),
    (PACK | {"strategy": "none"}, "pack=True needs a strategy that assigns samples to ranks, got 'none'; ..."),
    (PACK | {"window": 2}, "pack=True decides which samples a step has; leave out window=2"),
    ({"pack": True}, "BalanceConfig: pack=True has no effect without max_tokens_per_rank; give both, ..."),
    ({"refit_every": 5, "on_step": None}, "BalanceConfig: refit_every=5 has no effect without on_step; give both, ..."),
    ({"refit_every": 5, "strategy": "none"}, "BalanceConfig: refit_every=5 applies to ... than strategy='none', ..."),
    ({"refit_every": 5, "cost": PADDED}, "refit_every=5 changes nothing: samples of a PaddedCost ...; leave it out"),
    ({"refit_every": 5, "cost": cost_of([1])}, f"refit_every=5 needs a cost that says ... count, got {COST[9:]}; ..."),
    ({"refit_every": 5, **PACK}, "refit_every=5 does not go with pack=True of a Balancer, whose steps have ..."),
]
FROM_DICT: list[tuple[dict[str, Any], str]] = [
    ({}, "BalanceConfig: missing a required argument: 'cost'; its settings are cost, strategy, tolerance, max_..."),
    ({"cost": LINEAR, "windows": 2}, "BalanceConfig has the unknown key 'windows'; did you mean window..."),
    ({"cost": "mine"}, "no cost is called 'mine'; known are hstu, self-attention, linear, padded, measured, ..."),
    ({"cost": "linear"}, "the cost 'linear': missing a required argument: 'interleave_actions'; its settings are ..."),
    ({"cost": HALF | {"wide": 1}}, "the cost 'linear' has the unknown key 'wide'; known keys are ..."),
    ({"cost": {"name": "padded", "row": "linear"}}, "the cost 'padded': row must be of type TokenCost, got 'linear'"),
    ({"cost": {"name": "ones", "power": 2}}, "the cost 'ones' is a function, without settings; leave out power"),
]
FITS: list[tuple[Callable[..., tuple[Any, ...]], str]] = [
    (lambda t, s, n: (t[:19], s[:19]), "19 times are too few to fit a cost; measure at least 20"),
    (lambda t, s, n: (t, s[:-1]), "there must be one time for each step, got 200 steps and (199,) times"),
    (lambda t, s, n: (t, np.where(n == 3, -1, s)), "... 1 of 200 are not, the first -1.0 seconds of step 3; ..."),
    (lambda t, s, n: (np.full((200, 4), 100), 1 + n / 200), SIMILAR),
    (lambda t, s, n: same(np.where(np.arange(16) < n[:, np.newaxis] % 16 + 1, 64, 0)), ALIKE),
    (lambda t, s, n: (t * 1.0, s), "lengths must be integers [samples] ...; step 0 has float64 of shape (16,)"),
    (lambda t, s, n: (t - 10_000, s), "step 0 has a sample of -9,... tokens, which must be between 0 and 131,072; ..."),
    (lambda t, s, n: (t, 1 + n % 7), "tokens explain ...% of the variance of the ..., at least 80% is needed; ..."),
    (lambda t, s, n: (t, 1 - s), "the time of the 200 steps does not grow with tokens; time the forward ..."),
    (lambda t, s, n: (t, s * np.where(n % 10 < 3, 10, 1)), "60 of 200 times are far from ..., at most 25% may be; ..."),
    (lambda t, s, n: (t, s, t[:-1]), "candidates must have an array for each step, got 199 for the 200 steps ..."),
    (lambda t, s, n: (t, s, t * 0.5), "candidates must be integers of the same shape ... has float64 of shape (16,)"),
    (lambda t, s, n: (t, s, t + (n == 7)[:, np.newaxis]), "step 7 has a sample of ... tokens, ...; correct ..."),
]
FILES: list[tuple[dict[str, Any], str]] = [
    ({"fraction_bits": ...}, ": the cost: missing a required argument: 'fraction_bits'; its ...; fit the cost again"),
    ({"linear": -1}, ": the cost: linear must be at least 0, got -1; fit the cost again"),
    ({"linear": 0, "quadratic": 0}, ": linear and quadratic must not both be 0: ...; fit the cost again"),
    ({"linear": 2**46}, ": linear 70368744177664 and quadratic 11 are too large: ... less than 2^62; fit ..."),
    ({"seconds_per_step": float("nan")}, ": the cost: seconds_per_step must be at least 0 and finite, got nan; ..."),
    ({"version": 2}, " has version 2, this evenrank reads 1; fit the cost again"),
    ({"format": "other"}, " is not a measured cost; create one with MeasuredCost.save"),
]
PARTITIONS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "random"}, "...'random'; known are none, karmarkar-karp, lpt-swap, min-move"),
    ({"world_size": 4}, "...got 6 costs for world_size=4..."),
    ({"num_real": np.array([4, 0])}, "num_real must be 0..3 for each of 2 ranks, got [4, 0]"),
    ({"tokens": np.arange(5)}, "tokens must have one value for each of 6 rows, got 5"),
    ({"costs": np.array([-1, 3])}, "costs must not be negative and must sum to at most 2^62, got -1..3"),
    ({"max_tokens_per_rank": 5}, "max_tokens_per_rank needs the tokens of the samples..."),
    (EXCEEDED, "... = 5 cannot be kept: ... with 6 tokens; the longest sample has 5, the mean ... is 6; raise ..."),
    ({"strategy": np.array([0, 0, -1, 1, 1, 1])}, "the strategy 'mine' must return ranks 0..1, got -1..1"),
    ({"strategy": np.array([0, 0, 1, 1, 1, 1])}, "...'mine' must assign 3 of the 6 slots, ...; rank 0 got 2"),
]
Calls = list[tuple[Callable[[Scene], Any], str]]
CONFIG: Calls = [
    (lambda _: LinearCost(interleave_actions=True, max_tokens=0), "...max_tokens must be at least 1, got 0"),
    (lambda _: balance.SelfAttentionCost(**SHAPE, ffn_multiplier=-4), "...must be above 0 and finite, got -4"),
    (lambda _: scaled(cost_of([0.5, 1.0])), f"{COST} must return int64 of shape (2,), got float64 of shape ..."),
    (lambda _: scaled(cost_of([1, -5])), f"{COST} must not be negative, got -5"),
    (lambda _: scaled(cost_of([1, 2**60])), "a cost of 1152921504606846976 is too large ... over 8 samples; ..."),
    (lambda _: scaled(cost_of(raises="a"), b=[4, 1]), f"{COST} raised KeyError: 'a'; ... keys item_id, b"),
    (lambda _: scaled(LinearCost(interleave_actions=True)), "the cost LinearCost needs the key 'action'; ..."),
    (lambda _: scaled(LINEAR, (0, 4), item_id=[9, 3]), "row 1 has 4 candidates, but 3 values of 'item_id', ..."),
    (lambda _: scaled(LONG, item_id=[5, 30_000_000]), "... of 30,000,000 tokens does not fit in int64; max_tokens ..."),
    (lambda _: tokens([0, 2**31]), "tokens() of the cost Counting must return 0..2147483647 ... 0..2147483648"),
    (lambda _: balanced("out/ml-20m"), "batches is a path, 'out/ml-20m'; pass build_loader(path, config, ..."),
    (lambda _: balanced(data_loader().dataset), "batches is a TensorDataset, a Dataset of samples; pass ..."),
    (lambda _: balanced(sample()), NOT_BATCHES.format("CollatedBatch")),
    (lambda _: balanced([], "tpu"), "device is 'tpu', which PyTorch does not know..."),
    (lambda _: balanced([], "meta"), "device is meta; batches can be on cpu or cuda..."),
    (lambda _: balanced(data_loader()).state_dict(), NO_STATE),
    (without_group, "refit_every=5 needs a process group, through which ranks share their times; call ..."),
    (lambda scene: write(scene, every=0), "...every must be at least 1, got 0"),
    (lambda scene: write(scene, "log", "Scalars"), "Scalars: log must be of type Callable..., got ..."),
]
DATA: Calls = [
    (lambda scene: MeasuredCost.load(scene.file("a", "b")), "<folder>/a cannot be read as a measured cost: Expect..."),
    (lambda scene: load(scene).save(scene.folder / "no" / "a"), "<folder>/no/a could not be written: No such file ..."),
    (lambda scene: write(scene, "folder"), "<folder>/folder cannot be written: File exists; choose another file"),
    (lambda scene: write(scene, "file", "TensorBoard"), "<folder>/file cannot be written: ...; choose another folder"),
    (lambda scene: write(scene, "s3://key:secret@bucket/log"), "s3://bucket/log is a URL; write the log to a ..."),
    (lambda scene: read_log(scene, "none"), "<folder>/none cannot be read: No such file or directory; check ..."),
    (lambda scene: read_log(scene, "text"), "<folder>/text has no record; line 1 is ...: it is not JSON; give ..."),
]
RANK: Calls = [
    (lambda _: train(sample(), {"item_id": 3, "label": 1}), NO_BATCH.format("dict of item_id, label")),
    (lambda _: train(sample(), sample().features), "... KeyedJaggedTensors; derive a dataclass from JaggedBatch ..."),
]
ROWS = [
    *(Row(partial(call, check, options), ConfigError, line) for options, line in OPTIONS),
    *(Row(partial(call, from_dict, {"options": options}), ConfigError, line) for options, line in FROM_DICT),
    *(Row(partial(call, fit, {"change": change}), ConfigError, line) for change, line in FITS),
    *(Row(partial(load, **change), DataError, f"<folder>/cost.json{line}") for change, line in FILES),
    *(Row(partial(call, split, options), ConfigError, line) for options, line in PARTITIONS),
    *(Row(of_scene, ConfigError, line) for of_scene, line in CONFIG),
    *(Row(of_scene, DataError, line) for of_scene, line in DATA),
    *(Row(of_scene, RankError, line) for of_scene, line in RANK),
    Row(without_tensorboard, MissingPackageError, "the package tensorboard is not installed; run pip install ..."),
]
