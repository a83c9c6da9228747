"""The code of the pages, run as it stands there: pieces one after the other in this process, programs on ranks.

A scenario has the name of a page and of its section. It puts what the reader has into `names`, yields to let the next
piece of code run in them, and checks what the code has made of them.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from evenrank.dataloader.balance import COSTS, STRATEGIES, BalanceConfig, Balancer, LinearCost, SelfAttentionCost
from evenrank.datasets import ORDERS, open_store, read_manifest
from evenrank.datasets.distributions import Uniform
from evenrank.training import StepTimer
from tests.pages import ROOT, code_of, commands, evenrank, page, section, single_rank
from tests.registrations import restored

COST = SelfAttentionCost(hidden=8, heads=1, head_dim=8, layers=1, ffn_multiplier=4)
LINEAR = LinearCost(interleave_actions=False)
WIDTH, HEADS, HEAD_DIM, NUM_ITEMS = 16, 2, 8, 501


class Names(dict[str, Any]):
    """The names that a page's code refers to, and those that it has defined."""

    path: Path
    """A dataset, see `small_dataset`."""
    folder: Path
    """The current folder."""

    def load(self, config: LoaderConfig, **options: Any) -> Any:
        return build_loader(self.path, config, rank=0, world_size=1, **options)


Scenario = Callable[[Names], Iterator[Any]]  # it may yield what to replace in the next piece
SCENARIOS: dict[tuple[str, str], Scenario] = {}
# Run elsewhere, or in need of what tests do not have; their names and arguments are checked all the same.
NOT_RUN = {
    ("start.md", "In your own training loop"),  # programs, run below
    ("how-to/own-loader.md", "Resuming on any number of ranks"),
    ("how-to/own-loader.md", "Without an exchange { #without-an-exchange }"),
    ("how-to/own-loader.md", "Process groups and device meshes"),
    ("how-to/continuous-logs.md", "A dataset per day"),
    ("how-to/gain.md", "1. Record"),
    ("how-to/clusters.md", "Data in an object store"),  # tests of the loaders read from a server of S3
    ("how-to/routing.md", "On stock TorchRec"),
    ("how-to/routing.md", "Checkpoints"),
    ("how-to/training.md", "TorchRec pipelines"),  # tests of examples do
    ("how-to/training.md", "Watchdogs"),  # needs a GPU
    ("how-to/trainers.md", "Lightning"),
    ("how-to/trainers.md", "Accelerate"),
    ("how-to/trainers.md", "TorchRec"),
}


def runs(name: str, heading: str = "") -> Callable[[Scenario], Scenario]:
    def register(scenario: Scenario) -> Scenario:
        SCENARIOS[name, heading] = scenario
        return scenario

    return register


@pytest.mark.parametrize(("name", "heading"), SCENARIOS, ids=lambda part: re.sub(r"\W+", "-", part))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:flex_attention called without")
def test_code_does_what_the_page_says(name: str, heading: str, small_dataset: Path, here: Path) -> None:
    names = Names(path=small_dataset, rank=0, world_size=1, device="cpu", cost=COST, torch=torch, F=functional)
    names.path, names.folder = small_dataset, here
    for place in ("demo/data", "mine", "all"):
        (here / "out" / place).parent.mkdir(parents=True, exist_ok=True)
        (here / "out" / place).symlink_to(small_dataset)
    torch.manual_seed(0)
    scenario = SCENARIOS[name, heading](names)
    with restored(COSTS, STRATEGIES, ORDERS):
        for code in code_of(section(page(name), heading)):
            for old, new in (next(scenario) or {}).items():
                assert old in code
                code = code.replace(old, new)
            exec(code, names)
        assert next(scenario, "checked") == "checked"


def test_every_piece_of_code_is_run() -> None:
    pages = [page("README.md"), page("start.md"), *page("how-to").glob("*.md"), page("explanation/fits-my-model.md")]
    found = set()
    for path in pages:
        name = path.name if path.parent == ROOT else str(path.relative_to(ROOT / "docs"))
        if (name, "") not in SCENARIOS:
            headings = re.findall(r"^## (.*)$", path.read_text(), re.M)
            found |= {(name, heading) for heading in headings if code_of(section(path, heading))}
    assert found == NOT_RUN | {(name, heading) for name, heading in SCENARIOS if heading}


def _ids(batch: Any) -> list[int]:
    ids: list[int] = batch.sample_ids[: batch.num_real].tolist()
    return ids


def _check_once(ids: list[int], path: Path) -> None:
    assert sorted(ids) == sorted(set(ids))
    assert len(ids) == read_manifest(path).splits["train"].rows


@runs("README.md")
def _loop_of_the_readme(names: Names) -> Iterator[Any]:
    seen: list[int] = []

    def model(batch: Any) -> Tensor:
        seen.extend(_ids(batch))
        return weight * batch.loss_tokens

    weight = nn.Parameter(torch.ones(()))
    names |= {"model": model, "optimizer": torch.optim.SGD([weight])}
    yield
    _check_once(seen, names.path)
    assert weight.item() < 1


@runs("start.md", "How samples reach their rank")
def _a_balancer(names: Names) -> Iterator[Any]:
    names["loader"] = names.load(LoaderConfig(batch_size=12))
    yield
    assert names["batch"].num_real == read_manifest(names.path).splits["train"].rows % 12


@runs("how-to/own-data.md", "Looking at it")
def _rows_are_shown(names: Names) -> Iterator[Any]:
    shown: list[Any] = []
    names["show"] = shown.extend
    yield {"pprint(open": "show(open"}
    assert len(shown) == 3
    assert all(len(row["item_id"]) <= 5 for row in shown)


@runs("how-to/own-loader.md", "From padded to jagged")
def _jagged_layers(names: Names) -> Iterator[Any]:
    """Each is that of each sample alone."""
    config = LoaderConfig(batch_size=50, max_history_length=60)
    *_, batch = names.load(config, balance=BalanceConfig(cost=LINEAR))
    assert 1 < batch.num_real < batch.batch_size  # rows of padding too
    names |= {"batch": batch, "embedding": nn.Embedding(NUM_ITEMS, WIDTH), "positions": nn.Embedding(60, WIDTH)}
    names |= {"scores": nn.Linear(WIDTH, NUM_ITEMS)}
    yield
    samples = names["items"].split(names["lengths"].tolist())
    yield
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])
    x = names["embedding"](torch.cat(samples)) + names["positions"](positions)
    torch.testing.assert_close(names["x"], x)
    yield
    torch.testing.assert_close(names["same"], x)
    assert names["padded"].shape == (len(samples), max(map(len, samples)), WIDTH)
    yield
    rows = x.split(names["lengths"].tolist())[: batch.num_real]
    torch.testing.assert_close(names["mean"][: batch.num_real], torch.stack([row.mean(0) for row in rows]))
    torch.testing.assert_close(names["last"], torch.stack([row[-1] for row in rows]))
    yield
    labels = [item for sample in samples for item in sample[1:].tolist()]
    assert names["labels"].tolist() == labels
    torch.testing.assert_close(names["loss"], names["loss_sum"] / len(labels))
    names["loss"].backward()
    assert names["embedding"].weight.grad.isfinite().all()


@runs("how-to/training.md", "Losses")
def _mean_losses_of_two_tasks(names: Names) -> Iterator[Any]:
    class Model(nn.Module):
        """Its first task has the number of items as its loss, its second twice as much."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, batch: Any) -> Tensor:
            return self.weight * len(batch.features["item_id"].values())

    data = RandomData(lengths=Uniform(low=2, high=20), num_real=Uniform(low=0, high=4))
    config = LoaderConfig(batch_size=4, max_history_length=20, max_num_candidates=1)
    printed: list[Any] = []
    with single_rank(), Balancer(RandomBatches(config, data, num_batches=6), BalanceConfig(cost=COST)) as balancer:
        model = DistributedDataParallel(Model())
        names |= {"mesh": init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "loader": balancer, "num_tasks": 2}
        names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0), "print": printed.append}
        yield
    batches = [*RandomBatches(config, data, num_batches=6)]
    mean = sum(len(each.features["item_id"].values()) for each in batches) / sum(each.loss_tokens for each in batches)
    assert printed == [[pytest.approx(mean), pytest.approx(2 * mean)]]


@runs("how-to/training.md", "Negatives")
def _sampled_softmax(names: Names) -> Iterator[Any]:
    embedding = nn.Embedding(NUM_ITEMS, 8)

    def encode(items: Any) -> Tensor:
        history = [row[:-1] for row in items.values().split(items.lengths().tolist())]
        return torch.stack([embedding(row).sum(dim=0) for row in history])

    names |= {"embedding": embedding, "encode": encode, "scale_loss": lambda loss_sum, batch: loss_sum}
    names |= {"balance": BalanceConfig(cost=LINEAR)}
    yield
    yield
    batch, expected = names["batch"], torch.zeros(())
    items, users = batch.features["item_id"], encode(batch.features["item_id"])
    assert batch.num_real < batch.batch_size
    for row, ids in enumerate(items.values().split(items.lengths().tolist())[: batch.num_real]):
        drawn = batch.negatives["item_id"].values()[64 * row : 64 * row + 64]
        both = (("positive", 1), ("negative", 64))
        log_q = torch.cat([batch.log_q[key].values()[n * row : n * row + n] for key, n in both])
        scores = embedding(torch.cat([ids[-1:], drawn])) @ users[row] - log_q
        expected = expected - scores.log_softmax(dim=0)[0]
    torch.testing.assert_close(names["loss_sum"], expected, rtol=1e-4, atol=1e-3)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.isfinite().all()


@runs("how-to/training.md", "Metrics")
def _metrics_of_perfect_scores(names: Names) -> Iterator[Any]:
    loader = names.load(LoaderConfig(batch_size=12, max_num_candidates=3))
    printed: list[Any] = []

    def model(batch: Any) -> tuple[None, Tensor]:
        return None, 8.0 * names["label_bits"](batch.labels["label"].values(), 2) - 4.0

    with single_rank():
        names |= {"mesh": init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), "balancer": loader}
        names |= {"model": model, "print": lambda *values: printed.extend(values)}
        yield
    auc, grouped, of_labels = printed
    assert {*auc, *grouped} <= {1.0} | {value for value in (*auc, *grouped) if value != value}
    assert of_labels["accuracy_0"] == 1.0


@runs("how-to/training.md", "Performance")
def _utilization(names: Names) -> Iterator[Any]:
    printed: list[str] = []
    batch = next(iter(names.load(LoaderConfig(batch_size=12, max_num_candidates=1))))
    peaks = SimpleNamespace(flops=lambda dtype: 1e12)
    names |= {"batch": batch, "seconds": 1.0, "print": printed.append, "peaks": peaks}
    yield {"device_peaks(device)": "peaks", 'contextual=("user_id",)': "contextual=()", ":.1%": ""}
    assert float(printed[0].removeprefix("MFU ")) == names["done"] / 1e12 > 0


@runs("how-to/trainers.md", "DDP and FSDP2")
def _a_checkpoint(names: Names) -> Iterator[Any]:
    """It is loaded into a job that has never stepped."""

    def job() -> tuple[Any, Any, Any]:
        model = nn.Linear(4, 4)
        loader = names.load(LoaderConfig(batch_size=12), balance=BalanceConfig(cost=COST))
        return model, torch.optim.Adam(model.parameters()), loader

    model, adam, loader = job()
    batches = iter(loader)
    trained = [sample for batch in itertools.islice(batches, 3) for sample in _ids(batch)]
    batches.close()
    model(torch.ones(4)).sum().backward()
    adam.step()
    names |= {"model": model, "optimizer": adam, "loader": loader, "folder": str(names.folder / "saved")}
    with single_rank():
        yield
        new_model, new_adam, new_loader = job()
        parts = {"app": names["AppState"](new_model, new_adam), "data": new_loader}
        names["dcp"].load(parts, checkpoint_id=names["folder"])
    torch.testing.assert_close(new_model.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert adam.state_dict()["state"]
    torch.testing.assert_close(new_adam.state_dict()["state"], adam.state_dict()["state"], rtol=0, atol=0)
    _check_once(trained + [sample for batch in new_loader for sample in _ids(batch)], names.path)


@runs("how-to/continuous-logs.md", "Day by day")
def _windows_of_time(names: Names) -> Iterator[Any]:
    """Each is trained before the next one is evaluated."""
    trained: list[tuple[int, int]] = []
    printed: list[str] = []

    def evaluate(following: Any) -> float:
        assert {batch.epoch for batch in following} == {trained[-1][0] + 1}
        return 0.5

    names |= {"balance": None, "saved": None, "evaluate": evaluate, "print": printed.append}
    names["train"] = lambda batch: trained.extend((batch.epoch, sample) for sample in _ids(batch))
    yield
    last = names["loader"].num_windows - 1
    assert {window for window, _ in trained} == set(range(last))
    assert len(set(trained)) == len(trained)
    assert [line[:10] for line in printed[1:]] == [line[14:24] for line in printed[:-1]]  # each begins where one ends
    loader = names["open_windows"](shuffle=True)  # as of the next day
    loader.begin_after(names["saved"])
    assert loader.epoch == last


@runs("how-to/continuous-logs.md", "A log that grows")
def _a_log(names: Names) -> Iterator[Any]:
    """A second job continues where the first one has saved."""
    records = range(420)
    columns = {"user_id": [*records], "item_id": [[record % 50] for record in records]}
    columns |= {"action": [[1]] * len(records), "timestamp_ms": [[record] for record in records]}
    (names.folder / "log").mkdir()
    pq.write_table(pa.table(columns), names.folder / "log" / "00.parquet")
    (names.folder / "log" / "_END").touch()
    seen: list[int] = []
    names |= {"saved": None, "model": nn.Linear(1, 1), "train": lambda batch: seen.extend(_ids(batch))}
    yield
    assert seen == [*records]
    seen.clear()
    names["saved"] = torch.load("saved.pt", weights_only=True)
    exec(code_of(section(page("how-to/continuous-logs.md"), "A log that grows"))[0], names)
    assert seen == [*records][400:]


@runs("how-to/continuous-logs.md", "Replayed requests")
def _requests(names: Names) -> Iterator[Any]:
    line = commands(section(page("how-to/continuous-logs.md"), "Replayed requests"))[0]
    evenrank(line.replace("ml-latest-small", "synthetic --users 50").split()[1:])
    printed: list[str] = []
    names |= {"model": lambda batch: batch.labels["label"].values(), "print": printed.append}
    yield
    answered = sum(int(re.findall(r"\d+", line)[0]) for line in printed)
    assert 0 < answered <= sum(split.interactions for split in read_manifest("out/requests").splits.values())


@runs("how-to/gain.md", "While a job runs")
def _measured_steps(names: Names) -> Iterator[Any]:
    """A loop with its own collectives measures balanced and unbalanced steps; writers take steps."""
    measured: list[Any] = []
    weight = nn.Parameter(torch.zeros(()))
    names |= {"writers": [measured.append], "config": LoaderConfig(batch_size=8), "dist": dist, "StepTimer": StepTimer}
    names |= {"BalanceConfig": BalanceConfig, "build_loader": build_loader, "optimizer": torch.optim.SGD([weight])}
    names["scale_loss"] = lambda loss, batch: loss
    names["model"] = SimpleModel(weight)
    with single_rank():
        yield {"compare_every=100": "compare_every=2"}
    assert [step.is_balanced for step in measured] == [number % 2 == 0 for number in range(len(measured))]
    assert all(step.compute_seconds is not None for step in measured[1:])
    logged: list[str] = []
    sys.modules["wandb"] = SimpleNamespace(init=lambda project: SimpleNamespace(log=logged.extend))  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]
    for writer in names["writers"]:
        for step in measured:
            writer(step)
        writer.close()
    assert (names.folder / "out" / "balance.jsonl").exists()
    assert next((names.folder / "out" / "tensorboard").iterdir()).stat().st_size > 0
    assert {"balance/idle_after", "balance/step"} <= set(logged)


class SimpleModel:
    """A model of one weight, whose loss is the number of loss tokens."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def __call__(self, batch: Any) -> Tensor:
        return self.weight * batch.loss_tokens

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight]


@runs("how-to/gain.md", "Fit while the job trains")
def _a_fitted_cost(names: Names) -> Iterator[Any]:
    measured: list[Any] = []
    model = nn.ParameterList([nn.Parameter(torch.zeros(()))])
    names |= {"writers": [measured.append], "config": LoaderConfig(batch_size=2), "StepTimer": StepTimer}
    names |= {"BalanceConfig": BalanceConfig, "build_loader": build_loader, "scale_loss": lambda loss, batch: loss}
    names |= {"model": SimpleModel(model[0]), "optimizer": torch.optim.SGD(model.parameters())}
    with single_rank():
        yield {"refit_every=200": "refit_every=20"}
    assert len([step for step in measured if step.compute_seconds is not None]) == len(measured) - 1 > 40
    assert (names.folder / "out" / "cost.json").exists() == (names["timer"].cost is not None)


@runs("how-to/extending.md", "A cost")
def _own_cost(names: Names) -> Iterator[Any]:
    yield
    costs = names["my_cost"]({"item_id": np.array([0, 1, 3])}, np.zeros(3, dtype=np.int64))
    assert costs.tolist() == [0, 1001, 3009]
    yield
    assert names["by_name"].cost is names["my_cost"]
    assert names["of_layers"].cost.layers == 8


@runs("how-to/extending.md", "A strategy")
def _own_strategy(names: Names) -> Iterator[Any]:
    """Samples are assigned back and forth by descending cost."""
    trained: list[Any] = []
    config = LoaderConfig(batch_size=6, max_history_length=50, drop_last=True)
    names |= {"np": np, "config": config, "world_size": 2, "train": trained.append}
    names["my_cost"] = lambda lengths, num_candidates: lengths["item_id"]
    yield
    yield
    loaded = [build_loader(names.path, config, rank=rank, world_size=2) for rank in range(2)]
    for share, *step in zip(trained, *loaded, strict=True):
        lengths = sorted((length for batch in step for length in _lengths(batch)), reverse=True)
        assert sorted(_lengths(share), reverse=True) == [lengths[i] for i in range(12) if i % 4 in (0, 3)]


def _lengths(batch: Any) -> list[int]:
    lengths: list[int] = batch.features["item_id"].lengths()[: batch.num_real].tolist()
    return lengths


@runs("how-to/extending.md", "An order")
def _own_order(names: Names) -> Iterator[Any]:
    """Blocks have histories of similar length, and are shuffled."""
    trained: list[Any] = []
    names |= {"__name__": "extending", "train": trained.append}
    yield
    yield
    lengths = open_store(names.path).lengths
    seen = [int(lengths[sample]) for batch in trained for sample in _ids(batch)]
    num_full = len(lengths) // 4
    pieces = [sorted(piece) for piece in np.split(np.array(seen)[: 4 * num_full], num_full)]
    assert np.concatenate([*sorted(pieces), seen[4 * num_full :]]).tolist() == sorted(lengths)
    assert pieces != sorted(pieces)
    assert repr(names["in_pairs"].order) == "SimilarLengths(block=2)"


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def _hstu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = functional.silu(query @ key.transpose(1, 2) / HEAD_DIM**0.5).tril() / 512
    return weights @ value


def _varlen(query: Tensor, key: Tensor, value: Tensor, *lengths: Any, window_size: tuple[int, int]) -> Tensor:
    """Stand in for PyTorch's, which needs a GPU."""
    offsets, same, longest, _ = lengths
    assert offsets is same
    assert offsets.dtype == torch.int32
    assert longest >= int(offsets.diff().max())
    assert window_size == (-1, 0)  # causal
    rows = zip(*(x.split(offsets.diff().tolist()) for x in (query, key, value)), strict=True)
    return torch.cat([_causal(*(x.transpose(0, 1) for x in row)).transpose(0, 1) for row in rows])


@runs("explanation/fits-my-model.md")
def _attention(names: Names) -> Iterator[Any]:
    """Each kind is attention over each sample alone; packed steps are full, windows have similar lengths."""
    config = LoaderConfig(batch_size=50)
    *_, batch = names.load(config)
    embedding = nn.Embedding(NUM_ITEMS, WIDTH)
    projections = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for module in (embedding, *projections):
        module.requires_grad_(requires_grad=False)  # on the CPU FlexAttention has no backward pass
    names |= {"batch": batch, "embedding": embedding, "projections": projections, "heads": HEADS, "max_length": 60}
    names["head_dim"] = HEAD_DIM
    yield
    history = names["k"]
    three = tuple(project(embedding(history.values())).unflatten(-1, (HEADS, HEAD_DIM)) for project in projections)

    def alone(attend: Callable[..., Tensor]) -> list[Tensor]:
        rows = zip(*(x.split(history.lengths().tolist()) for x in three), strict=True)
        return [attend(*(x.transpose(0, 1) for x in row)).transpose(0, 1) for row in rows]

    for attend, changes in ((_hstu, {}), (_full, {}), (_causal, {}), (_causal, {"varlen_attn(": "varlen("})):
        names |= dict(zip(("query", "key", "value"), three, strict=True)) | {"varlen": _varlen}
        yield changes
        torch.testing.assert_close(names["attended"], torch.cat(alone(attend)))
    names |= {"config": LoaderConfig(batch_size=4), "world_size": 2}
    yield {"8192": "64"}
    packed = [_lengths(batch) for batch in names["loader"]]
    assert len({*map(len, packed)}) > 1
    assert max(map(sum, packed)) <= 64
    yield
    padded = names["attended"].transpose(1, 2)
    for row, expected in zip(padded, alone(_causal)[: batch.num_real], strict=True):
        torch.testing.assert_close(row[: len(expected)], expected)
    yield
    windows, single = names["loader"], build_loader(names.path, names["config"], rank=0, world_size=2)
    assert _num_padded_tokens(windows) < 0.8 * _num_padded_tokens(single)


def _num_padded_tokens(loader: Any) -> int:
    return sum(len(lengths) * max(lengths) for lengths in map(_lengths, loader))
