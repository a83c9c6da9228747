"""The code of the pages, run as it stands there, one piece after the other, in this process.

A scenario belongs to a section of a page. It puts into `names` what the reader has beyond `_readers_names`, yields
to let the next piece of code run in them, maybe with replacements, and checks what the code has made of them.
"""

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from evenrank.dataloader import LoaderConfig, RandomBatches, RandomData, build_loader
from evenrank.dataloader.balance import COSTS, STRATEGIES, BalanceConfig, Balancer, LinearCost
from evenrank.datasets import ORDERS, open_store, read_manifest
from evenrank.datasets.distributions import Uniform
from evenrank.training import StepTimer
from tests.cli.programs import printed as evenrank
from tests.examples.test_mlperf_yambda import draw_log, fraction_of, write_log
from tests.pages import code_of, commands, page, section, single_rank
from tests.registrations import restored

WIDTH, HEADS, HEAD_DIM, NUM_ITEMS = 16, 2, 8, 501
LINEAR = LinearCost(interleave_actions=False)
close = torch.testing.assert_close
Scenario = Callable[[dict[str, Any]], Iterator[Any]]
SCENARIOS: dict[tuple[str, str], Scenario] = {}
# Run elsewhere, or in need of what tests do not have; their names and arguments are checked all the same.
NOT_RUN = """
start.md: In your own training loop
how-to/own-loader.md: Resuming on any number of ranks|Without an exchange { #without-an-exchange }
how-to/own-loader.md: Process groups and device meshes
how-to/continuous-logs.md: A dataset per day
how-to/gain.md: 1. Record
how-to/clusters.md: Data in an object store
how-to/routing.md: On stock TorchRec|Checkpoints
how-to/training.md: TorchRec pipelines|Watchdogs
how-to/trainers.md: Lightning|Accelerate|TorchRec
"""
OF_TWO_RANKS = ("how-to/extending.md", "explanation/fits-my-model.md")  # the loader of one of them, without a group


def runs(name: str, heading: str = "") -> Callable[[Scenario], Scenario]:
    return lambda scenario: SCENARIOS.setdefault((name, heading), scenario)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, batch: Any) -> Tensor:
        self.seen += _ids(batch)
        loss: Tensor = self.weight * batch.loss_tokens
        return loss


def _readers_names(path: Path) -> dict[str, Any]:
    model, config, printed, trained = _Model(), LoaderConfig(batch_size=12), list[Any](), list[Any]()
    names = {"path": path, "rank": 0, "world_size": 1, "device": "cpu", "torch": torch, "F": functional, "np": np}
    names |= {"config": config, "cost": LINEAR, "balance": BalanceConfig(cost=LINEAR), "saved": None, "dist": dist}
    names |= {"loader": build_loader(path, config, rank=0, world_size=1), "StepTimer": StepTimer}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "print": printed.append}
    names |= {"printed": printed, "trained": trained, "train": trained.append, "writers": [trained.append]}
    return names | {"BalanceConfig": BalanceConfig, "build_loader": build_loader}


@pytest.mark.parametrize(("name", "heading"), SCENARIOS, ids=lambda part: re.sub(r"\W+", "-", part))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:flex_attention called without")
def test_code_does_what_the_page_says(name: str, heading: str, small_dataset: Path, here: Path) -> None:
    (here / "out" / "demo").mkdir(parents=True)
    for place in ("demo/data", "mine", "all"):
        (here / "out" / place).symlink_to(small_dataset)
    torch.manual_seed(0)
    group = contextlib.nullcontext() if name in OF_TWO_RANKS else single_rank()
    with restored(COSTS, STRATEGIES, ORDERS), group:
        names = _readers_names(small_dataset)
        scenario = SCENARIOS[name, heading](names)
        for code in code_of(section(page(name), heading)):
            for old, new in (next(scenario) or {}).items():
                assert old in code
                code = code.replace(old, new)
            exec(code, names)
        assert next(scenario, "checked") == "checked"


def test_every_piece_of_code_is_run() -> None:
    known = {(name, heading) for name, heading in SCENARIOS if heading}
    for line in NOT_RUN.strip().splitlines():
        name, listed = line.split(": ")
        known |= {(name, heading) for heading in listed.split("|")}
    found = set()
    for name in ("start.md", *(f"how-to/{path.name}" for path in page("how-to").glob("*.md"))):
        headings = re.findall(r"^## (.*)$", page(name).read_text(), re.M)
        found |= {(name, heading) for heading in headings if code_of(section(page(name), heading))}
    assert found == known


def test_every_page_on_models_has_a_test_that_runs_it() -> None:
    names = {f"how-to/models/{path.name}" for path in page("how-to/models").glob("*.md")}
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("*.py"))
    assert {name for name in names if name not in tests} == set()


def _load(names: dict[str, Any], **options: Any) -> Any:
    return build_loader(names["path"], LoaderConfig(**options), rank=0, world_size=1, balance=names["balance"])


def _ids(batch: Any) -> list[int]:
    ids: list[int] = batch.sample_ids[: batch.num_real].tolist()
    return ids


def _lengths(batch: Any) -> list[int]:
    lengths: list[int] = batch.features["item_id"].lengths()[: batch.num_real].tolist()
    return lengths


def _check_once(ids: list[int], names: dict[str, Any]) -> None:
    assert len(ids) == len(set(ids)) == read_manifest(names["path"]).splits["train"].rows


@runs("README.md")
def _loop_of_the_readme(names: dict[str, Any]) -> Iterator[Any]:
    yield
    _check_once(names["model"].seen, names)
    assert names["model"].weight < 0


@runs("start.md", "How samples reach their rank")
def _a_balancer(names: dict[str, Any]) -> Iterator[Any]:
    yield
    assert names["batch"].num_real == read_manifest(names["path"]).splits["train"].rows % 12


@runs("how-to/own-data.md", "Looking at it")
def _rows_are_shown(names: dict[str, Any]) -> Iterator[Any]:
    yield {"pprint(open": "print(open"}
    assert [len(row["item_id"]) <= 5 for row in names["printed"][0]] == [True] * 3


@runs("how-to/own-loader.md", "From padded to jagged")
def _jagged_layers(names: dict[str, Any]) -> Iterator[Any]:
    """Each is that of each sample alone."""
    *_, batch = _load(names, batch_size=50, max_history_length=60)
    assert 1 < batch.num_real < batch.batch_size  # rows of padding too
    names |= {"batch": batch, "embedding": nn.Embedding(NUM_ITEMS, WIDTH), "positions": nn.Embedding(60, WIDTH)}
    names["scores"] = nn.Linear(WIDTH, NUM_ITEMS)
    for _ in range(5):
        yield
    samples = names["items"].split(names["lengths"].tolist())
    rows = [names["embedding"](sample) + names["positions"].weight[: len(sample)] for sample in samples]
    close(names["x"], torch.cat(rows))
    close(names["same"], torch.cat(rows))
    assert names["padded"].shape == (len(samples), max(map(len, samples)), WIDTH)
    close(names["mean"][: batch.num_real], torch.stack([row.mean(0) for row in rows if len(row)]))
    close(names["last"], torch.stack([row[-1] for row in rows if len(row)]))
    assert names["labels"].tolist() == [item for sample in samples for item in sample[1:].tolist()]
    close(names["loss"], names["loss_sum"] / len(names["labels"]))
    names["loss"].backward()
    assert names["embedding"].weight.grad.isfinite().all()


class _TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, batch: Any) -> Tensor:
        return self.weight * len(batch.features["item_id"].values())


@runs("how-to/training.md", "Losses")
def _mean_losses_of_two_tasks(names: dict[str, Any]) -> Iterator[Any]:
    batches = RandomBatches(
        LoaderConfig(batch_size=4, max_history_length=20, max_num_candidates=1),
        RandomData(lengths=Uniform(low=2, high=20), num_real=Uniform(low=0, high=4)),
        num_batches=6,
    )
    names |= {"model": DistributedDataParallel(_TwoTasks()), "num_tasks": 2}
    names["mesh"] = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.0)
    with Balancer(batches, names["balance"]) as names["loader"]:
        yield
    mean = sum(len(each.features["item_id"].values()) for each in batches) / sum(each.loss_tokens for each in batches)
    assert names["printed"] == [[pytest.approx(mean), pytest.approx(2 * mean)]]


@runs("how-to/training.md", "Negatives")
def _sampled_softmax(names: dict[str, Any]) -> Iterator[Any]:
    embedding = nn.Embedding(NUM_ITEMS, 8)

    def encode(items: Any) -> Tensor:
        return torch.stack([embedding(row[:-1]).sum(dim=0) for row in items.values().split(items.lengths().tolist())])

    names |= {"embedding": embedding, "encode": encode, "scale_loss": lambda loss_sum, batch: loss_sum}
    yield
    yield
    batch, expected = names["batch"], torch.zeros(())
    items, users = batch.features["item_id"], encode(batch.features["item_id"])
    for row, ids in enumerate(items.values().split(items.lengths().tolist())[: batch.num_real]):
        drawn = batch.negatives["item_id"].values()[64 * row : 64 * row + 64]
        log_q = [batch.log_q[key].values()[n * row : n * row + n] for key, n in (("positive", 1), ("negative", 64))]
        scores = embedding(torch.cat([ids[-1:], drawn])) @ users[row] - torch.cat(log_q)
        expected = expected - scores.log_softmax(dim=0)[0]
    close(names["loss_sum"], expected, rtol=1e-4, atol=1e-3)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.isfinite().all()


@runs("how-to/training.md", "Metrics")
def _metrics_of_perfect_scores(names: dict[str, Any]) -> Iterator[Any]:
    names |= {"balancer": _load(names, batch_size=12, max_num_candidates=3)}
    names["mesh"] = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    names["model"] = lambda batch: (None, 8 * names["label_bits"](batch.labels["label"].values(), 2) - 4)
    names["print"] = lambda *values: names["printed"].extend(values)
    yield
    auc, grouped, of_labels = names["printed"]
    assert {1.0} <= {*auc, *grouped} <= {1.0} | {value for value in (*auc, *grouped) if value != value}
    assert of_labels["accuracy_0"] == of_labels["accuracy_1"] == 1.0


@runs("how-to/models/evaluation-in-time.md")
def _evaluation_in_time(names: dict[str, Any]) -> Iterator[Any]:
    """The best of 21 candidates, the target and others, is the item with the largest id."""
    yield
    batch = next(iter(names["loader"]))
    assert len(batch.negatives["item_id"].values()) == 64 * batch.num_real > 0
    store = open_store(names["path"], "eval")
    users, last = store.columns["user_id"].tolist(), store.columns["item_id"][store.ends - 1].tolist()
    sets = [[*range(1, 21), item] for item in last]
    pq.write_table(pa.table({"user_id": users, "candidates": sets}), "candidates.parquet")
    names["model"] = lambda batch, items: items.float()
    yield {"batch_size=256": "batch_size=20"}
    share = np.mean([item >= 20 for item in last])
    assert names["printed"][0]["recall@1"] == pytest.approx(share)
    written = pq.read_table("predictions").to_pydict()
    assert dict(zip(written["user_id"], [best[0] for best in written["item_id"]], strict=True)) == {
        user: float(max(20, item)) for user, item in zip(users, last, strict=True)
    }


@runs("how-to/training.md", "Performance")
def _utilization(names: dict[str, Any]) -> Iterator[Any]:
    names |= {"batch": next(iter(_load(names, batch_size=12, max_num_candidates=1))), "seconds": 1.0}
    names["peaks"] = SimpleNamespace(flops=lambda dtype: 1e12)
    yield {"device_peaks(device)": "peaks", 'contextual=("user_id",)': "contextual=()", ":.1%": ""}
    assert float(names["printed"][0].removeprefix("MFU ")) == names["done"] / 1e12 > 0


@runs("how-to/trainers.md", "DDP and FSDP2")
def _a_checkpoint(names: dict[str, Any]) -> Iterator[Any]:
    """It is loaded into a job that has never stepped."""
    model, new_model = nn.Linear(4, 4), nn.Linear(4, 4)
    adam, new_adam = (torch.optim.Adam(each.parameters()) for each in (model, new_model))
    loader, new_loader = (_load(names, batch_size=12) for _ in range(2))
    batches = iter(loader)
    trained = [sample for batch in itertools.islice(batches, 3) for sample in _ids(batch)]
    batches.close()
    model(torch.ones(4)).sum().backward()
    adam.step()
    names |= {"model": model, "optimizer": adam, "loader": loader, "folder": "saved"}
    yield
    names["dcp"].load({"app": names["AppState"](new_model, new_adam), "data": new_loader}, checkpoint_id="saved")
    close(new_model.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert adam.state_dict()["state"]
    close(new_adam.state_dict()["state"], adam.state_dict()["state"], rtol=0, atol=0)
    _check_once(trained + [sample for batch in new_loader for sample in _ids(batch)], names)


@runs("how-to/continuous-logs.md", "Day by day")
def _windows_of_time(names: dict[str, Any]) -> Iterator[Any]:
    """Each is trained before the next one is evaluated."""
    trained: list[tuple[int, int]] = []

    def evaluate(following: Any) -> float:
        assert {batch.epoch for batch in following} == {trained[-1][0] + 1}
        return 0.5

    names |= {"evaluate": evaluate, "train": lambda batch: trained.extend((batch.epoch, id) for id in _ids(batch))}
    yield
    last, printed = names["loader"].num_windows - 1, names["printed"]
    assert {window for window, _ in trained} == set(range(last))
    assert len(set(trained)) == len(trained)
    assert [line[:10] for line in printed[1:]] == [line[14:24] for line in printed[:-1]]  # each begins where one ends
    loader = names["open_windows"]("shuffle")  # as of the next day
    loader.begin_after(names["saved"])
    assert loader.epoch == last


@runs("how-to/mlperf-yambda.md", "Samples")
def _windows_of_yambda(names: dict[str, Any]) -> Iterator[Any]:
    """Users are trained or held out, and all of these are evaluated in each of the windows but the last."""
    write_log(Path("data"), *draw_log(150, 60, 500))
    (line,) = commands(section(page("how-to/mlperf-yambda.md"), "Data"))
    evenrank(*line.replace("5b", "50m").split()[1:])
    Path("out/yambda-5b").symlink_to("yambda-50m")
    trained, evaluated = set[int](), set[int]()

    def users(batch: Any) -> set[int]:
        return set(batch.features["user_id"].values().tolist())

    names |= {
        "train": lambda batch: trained.update(users(batch)),
        "print": lambda *values: names["printed"].append(values),
    }
    names["evaluate"] = lambda held_out: evaluated.update(*map(users, held_out))
    yield
    assert max(fraction_of(user, 0) for user in trained) < 0.9 <= min(fraction_of(user, 0) for user in evaluated)
    assert [window for window, _ in names["printed"]] == [*range(names["last"])]
    assert names["last"] == 299
    features = next(iter(names["loader"])).features
    assert {"user_x_artist", "user_x_artist_x_hour", "hour", "artist_id", "album_id"} < {*features.keys()}


@runs("how-to/models/stochastic-length.md")
def _stochastic_length(names: dict[str, Any]) -> Iterator[Any]:
    """Only what is trained is cut, to the length that the page names where histories are longer."""
    text = page("how-to/models/stochastic-length.md").read_text()
    (limit,) = re.findall(r"events, here (\d+), is whole", text)
    yield {"max_history_length=512": "max_history_length=50", "newest=64": "newest=8"}
    cut, whole = int(50**0.8), open_store(names["path"]).lengths
    lengths = dict(
        zip(
            itertools.chain(*map(_ids, names["trained"])),
            itertools.chain(*map(_lengths, names["trained"])),
            strict=True,
        )
    )
    assert int(limit) == int(512**0.8)
    assert {kept for sample, kept in lengths.items() if kept < min(whole[sample], 50)} == {cut}
    _check_once([*lengths], names)
    held_out = open_store(names["path"], "eval").lengths
    for batch in names["held_out"]:
        assert _lengths(batch) == [min(held_out[sample], 50) for sample in _ids(batch)]


@runs("how-to/continuous-logs.md", "A log that grows")
def _a_log(names: dict[str, Any]) -> Iterator[Any]:
    """A second job continues where the first one has saved."""
    columns = {"user_id": [*range(420)], "item_id": [[id % 50] for id in range(420)], "action": [[1]] * 420}
    Path("log").mkdir()
    pq.write_table(pa.table(columns | {"timestamp_ms": [[id] for id in range(420)]}), "log/00.parquet")
    Path("log/_END").touch()
    yield
    assert [id for batch in names["trained"] for id in _ids(batch)] == [*range(420)]
    names["trained"].clear()
    names["saved"] = torch.load("saved.pt", weights_only=True)
    exec(code_of(section(page("how-to/continuous-logs.md"), "A log that grows"))[0], names)
    assert [id for batch in names["trained"] for id in _ids(batch)] == [*range(400, 420)]


@runs("how-to/continuous-logs.md", "Replayed requests")
def _requests(names: dict[str, Any]) -> Iterator[Any]:
    line = commands(section(page("how-to/continuous-logs.md"), "Replayed requests"))[0]
    evenrank(*line.replace("ml-latest-small", "synthetic --users 50").split()[1:])
    names["model"] = lambda batch: batch.labels["label"].values()
    yield
    answered = sum(int(re.findall(r"\d+", line)[0]) for line in names["printed"])
    assert 0 < answered <= sum(split.interactions for split in read_manifest("out/requests").splits.values())


@runs("how-to/gain.md", "While a job runs")
def _measured_steps(names: dict[str, Any]) -> Iterator[Any]:
    """A loop with its own collectives measures balanced and unbalanced steps; writers take them."""
    names["scale_loss"] = lambda loss, batch: loss
    yield {"compare_every=100": "compare_every=2"}
    measured = names["trained"]
    assert [step.is_balanced for step in measured] == [number % 2 == 0 for number in range(len(measured))]
    assert all(step.compute_seconds is not None for step in measured[1:])
    logged: list[str] = []
    run = SimpleNamespace(log=logged.extend)
    with mock.patch.dict(sys.modules, {"wandb": SimpleNamespace(init=lambda project: run)}):
        yield
    for writer in names["writers"]:
        for step in measured:
            writer(step)
        writer.close()
    assert Path("out/balance.jsonl").exists()
    assert next(Path("out/tensorboard").iterdir()).stat().st_size > 0
    assert {"balance/idle_after", "balance/step"} <= set(logged)


@runs("how-to/gain.md", "Fit while the job trains")
def _a_fitted_cost(names: dict[str, Any]) -> Iterator[Any]:
    names |= {"config": LoaderConfig(batch_size=2), "scale_loss": lambda loss, batch: loss}
    yield {"refit_every=200": "refit_every=20"}
    assert len([step for step in names["trained"] if step.compute_seconds]) == len(names["trained"]) - 1 > 40
    assert Path("out/cost.json").exists() == (names["timer"].cost is not None)


@runs("how-to/extending.md", "A cost")
def _own_cost(names: dict[str, Any]) -> Iterator[Any]:
    yield
    assert names["my_cost"]({"item_id": np.array([0, 1, 3])}, np.zeros(3, dtype=np.int64)).tolist() == [0, 1001, 3009]
    yield
    assert names["by_name"].cost is names["my_cost"]
    assert names["of_layers"].cost.layers == 8


@runs("how-to/extending.md", "A strategy")
def _own_strategy(names: dict[str, Any]) -> Iterator[Any]:
    """Samples are assigned back and forth by descending cost."""
    config = LoaderConfig(batch_size=6, max_history_length=50, drop_last=True)
    names |= {"config": config, "world_size": 2, "my_cost": lambda lengths, num_candidates: lengths["item_id"]}
    yield
    yield
    loaded = (build_loader(names["path"], config, rank=rank, world_size=2) for rank in range(2))
    for share, *step in zip(names["trained"], *loaded, strict=True):
        lengths = sorted((length for batch in step for length in _lengths(batch)), reverse=True)
        assert sorted(_lengths(share), reverse=True) == [lengths[i] for i in range(12) if i % 4 in (0, 3)]


@runs("how-to/extending.md", "An order")
def _own_order(names: dict[str, Any]) -> Iterator[Any]:
    """Blocks have histories of similar length, and are shuffled."""
    names["__name__"] = "extending"
    yield
    yield
    lengths = open_store(names["path"]).lengths
    seen = [int(lengths[sample]) for batch in names["trained"] for sample in _ids(batch)]
    num_full = len(lengths) // 4
    pieces = [sorted(piece) for piece in np.split(np.array(seen)[: 4 * num_full], num_full)]
    assert np.concatenate([*sorted(pieces), seen[4 * num_full :]]).tolist() == sorted(lengths)
    assert pieces != sorted(pieces)
    assert repr(names["in_pairs"].order) == "SimilarLengths(block=2)"


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _hstu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (functional.silu(query @ key.transpose(1, 2) / HEAD_DIM**0.5).tril() / 512) @ value


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, offsets: Any, same: Any, longest: int, _: int, *, window_size: Any
) -> Tensor:
    """Stand in for PyTorch's, which needs a GPU."""
    assert (offsets is same, offsets.dtype, window_size) == (True, torch.int32, (-1, 0))  # causal
    assert longest >= int(offsets.diff().max())
    rows = zip(*(x.split(offsets.diff().tolist()) for x in (query, key, value)), strict=True)
    return torch.cat([_causal(*(x.transpose(0, 1) for x in row)).transpose(0, 1) for row in rows])


@runs("explanation/fits-my-model.md")
def _attention(names: dict[str, Any]) -> Iterator[Any]:
    """Each kind is attention over each sample alone; packed steps are full, windows have similar lengths."""
    *_, batch = _load(names, batch_size=50)
    embedding, projections = nn.Embedding(NUM_ITEMS, WIDTH), [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for module in (embedding, *projections):
        module.requires_grad_(requires_grad=False)  # on the CPU FlexAttention has no backward pass
    names |= {"batch": batch, "embedding": embedding, "projections": projections, "heads": HEADS, "varlen": _varlen}
    names |= {"head_dim": HEAD_DIM, "max_length": 60}
    yield
    history = names["k"]
    three = [project(embedding(history.values())).unflatten(-1, (HEADS, HEAD_DIM)) for project in projections]

    def alone(attend: Callable[..., Tensor]) -> list[Tensor]:
        rows = zip(*(x.split(history.lengths().tolist()) for x in three), strict=True)
        return [attend(*(x.transpose(0, 1) for x in row)).transpose(0, 1) for row in rows]

    full = functional.scaled_dot_product_attention
    for attend, changes in ((_hstu, {}), (full, {}), (_causal, {}), (_causal, {"varlen_attn(": "varlen("})):
        names |= dict(zip(("query", "key", "value"), three, strict=True))
        yield changes
        close(names["attended"], torch.cat(alone(attend)))
    names |= {"config": LoaderConfig(batch_size=4), "world_size": 2}
    yield {"8192": "64"}
    packed = [_lengths(batch) for batch in names["loader"]]
    assert len({*map(len, packed)}) > 1
    assert max(map(sum, packed)) <= 64
    yield
    for row, expected in zip(names["attended"].transpose(1, 2), alone(_causal)[: batch.num_real], strict=True):
        close(row[: len(expected)], expected)
    yield
    loaders = (names["loader"], build_loader(names["path"], names["config"], rank=0, world_size=2))
    windows, single = (sum(len(each) * max(each) for each in map(_lengths, loader)) for loader in loaders)
    assert windows < 0.8 * single
