from collections.abc import Callable
from typing import Any

import torch

from evenrank import training as t
from evenrank.core.errors import ConfigError, DataError
from evenrank.dataloader import LoaderConfig, build_loader
from evenrank.training.metrics import MeanMetrics
from tests.errors.scene import Row, Scene
from tests.examples.hstu.samples import make_batch
from tests.training.test_attention_timing import Attention, Model
from tests.training.test_loss import batch_of, steps_of


def row(call: Callable[[Scene], Any], line: str) -> Row:
    return Row(call, ConfigError, line)


def accumulated(returned: Any, got: str) -> Row:
    line = f"task_tokens must return a tensor [tasks], got {got}; add up boolea..."
    return row(lambda _: list(t.accumulate(steps_of([1]), 1, task_tokens=lambda batch: returned)), line)


ONE, TWO, COLUMN, BATCH = torch.zeros(1), torch.ones(2), torch.zeros(1, 1), batch_of(loss_tokens=1)


def predicted(scene: Scene, items: Any = TWO, *, epoch: int = 0, **options: Any) -> Any:
    """Write predictions for the first batch of an epoch, of which a writer was made for epoch 0."""
    loader = build_loader(scene.data, LoaderConfig(batch_size=2, max_num_candidates=1), rank=0, world_size=1)
    with t.PredictionWriter(scene.folder / "out", options.pop("loader", loader), **options) as writer:
        loader.begin_at(epoch)
        writer.write(next(iter(loader)), items, TWO)


def tracked(layers: Any, start: int, stop: int, line: str) -> Row:
    return row(lambda _: t.AttentionTracker(Model(), layers, device="cpu", start=start, stop=stop), line)


TASKS = batch_of(world_loss_tokens=8, dp_size=4, world_task_tokens=torch.tensor([8, 3]))
SHAPE: Any = {"hidden": 4, "head_dim": 4, "layers": 1}
T4: Any = t.peaks_by_name("Tesla T4")
ANY: Any = None
WRONG: Any = (ONE, TWO)

ROWS = [
    row(lambda _: t.scale_loss(ONE[0], TASKS), "loss_sums has the shape [], but the loss tokens of 2 tasks..."),
    row(lambda _: t.scale_loss(torch.ones(3), TASKS), "loss_sums has the shape [3], but the loss tokens of 2 tasks..."),
    row(lambda _: t.scale_loss(ONE, batch_of(), dp_size=2), "...has no world_loss_tokens; pass balance to build_lo..."),
    row(
        lambda _: t.scale_loss(ONE, batch_of(world_loss_tokens=1)), "...has no dp_size; balance the loader, or pass..."
    ),
    row(lambda _: t.scale_loss(WRONG, TASKS), "loss_sums must be a tensor, got tuple; pass the sums alone..."),
    row(lambda _: list(t.accumulate(steps_of([1]), 0)), "...num_steps must be at least 1, got 0"),
    row(
        lambda _: t.accumulate(steps_of([1]), 1, group=WRONG),
        "group must be a process group or a device mesh, got t...",
    ),
    row(
        lambda _: list(t.accumulate(steps_of([3, None]), 2)), "a batch has no world_loss_tokens; balance the loader..."
    ),
    accumulated(torch.tensor(3), "torch.int64 []"),
    accumulated(torch.ones(1, 2), "torch.float32 [1, 2]"),
    accumulated([3], "list"),
    row(lambda _: t.LossAverage(2).update(ONE, BATCH), "loss_sums must have one entry per task, 2, got [1]..."),
    row(
        lambda _: t.LossAverage(2).update(TWO, BATCH, task_tokens=ONE), "task_tokens must have one entry per task, 2..."
    ),
    row(lambda _: t.LossAverage(0), "...num_tasks must be at least 1, got 0"),
    row(lambda _: t.LossAverage().update(ONE.to("meta"), BATCH), "loss_sums are on meta, but added up on cpu; pass..."),
    row(lambda _: t.BinaryAUC(0), "...num_tasks must be at least 1, got 0"),
    row(lambda _: t.BinaryAUC(2).update(TWO, TWO), "...[n, 2], got scores [2] and targets [2]..."),
    row(lambda _: t.BinaryAUC().update(COLUMN, TWO[:, None]), "...got scores [1, 1] and targets [2, 1]..."),
    row(
        lambda _: t.BinaryAUC().update(COLUMN, COLUMN, groups=ONE), "groups must be integers [1], got torch.float32..."
    ),
    row(lambda _: t.RegressionMetrics().update(COLUMN, COLUMN, TWO), "...be [1], one per ...[2]..."),
    row(lambda _: t.RankingMetrics((5, 0)), "...ks must be at least 1, got 0"),
    row(lambda _: t.RankingMetrics().update(TWO), "places must be integers [n], got torch.float32 [2]..."),
    row(lambda _: t.RankingMetrics().update(ONE.int(), TWO), "weights must be [1], one per ...[2]..."),
    row(
        lambda _: MeanMetrics(["a"], {}, ANY, "cpu").add_terms(COLUMN.double(), TWO),
        "weights must be [1], one per s...",
    ),
    row(lambda s: predicted(s, epoch=1), "a batch of epoch 1 is not of 0; make a writer for each iteration"),
    row(
        lambda s: predicted(s), "items and scores must be [2] or [2, k], items integers, got torch.float32 [2] and ..."
    ),
    row(lambda s: predicted(s, ONE.int()), "...got torch.int32 [1] and scores [2]"),
    row(lambda s: predicted(s, loader=[1]), "PredictionWriter: loader must be of type Loader[Any], got [1]"),
    Row(
        lambda s: t.PredictionWriter(
            s.file("mine.txt", "") / "out", build_loader(s.data, LoaderConfig(batch_size=2), rank=0, world_size=1)
        ),
        DataError,
        "predictions cannot be written to <folder>/mine.txt/.out.partial ([Errno 20] Not a directory...); ...",
    ),
    row(
        lambda s: [s.file("out/mine.txt", ""), predicted(s, overwrite=True)],
        "<folder>/out is there, without predictions; remove it, or choose another folder",
    ),
    row(
        lambda s: [s.file("out/_predictions.json", ""), predicted(s)],
        "<folder>/out has predictions; pass overwrite=True, or choose another folder",
    ),
    tracked("x.*", 0, 1, "...no module ... 'x.*'; ... types Attention, Linear, Model..."),
    tracked(Attention, 3, 3, "the interval of steps is [3, 3)..."),
    tracked(Attention, -1, 2, "the interval of steps is [-1, 2)..."),
    row(
        lambda _: t.batch_work(make_batch([{}]), interleave_actions=False, contextual=["age"]),
        "...needs the key 'age'; batches have user_id, tags, item_id, action...",
    ),
    row(lambda _: t.hstu_flops(heads=0, **SHAPE), "...heads must be at least 1, got 0"),
    row(lambda _: t.decoder_flops(heads=1, ffn_hidden=0, **SHAPE), "...ffn_hidden must be at least 1, got 0"),
    row(lambda _: T4.flops(torch.bfloat16), "no peak is known for bfloat16 ...pass it in FLOP/s..."),
    row(lambda _: T4.flops(torch.float32, tf32=True), "no peak is known for TF32 ...pass it in FLOP/s..."),
    row(
        lambda _: t.computed_peaks((13, 7), 100, 2e9), "...compute capability is 13.7, ...pass the device's peak in..."
    ),
    row(lambda _: t.device_peaks("cpu"), "no peaks are known of the device cpu; pass a CUDA device..."),
    row(lambda _: t.StepTimer(every=0), "...every must be at least 1, got 0"),
    row(lambda _: t.StepTimer().watch(torch.ones(())), "the loss requires no gradient, ... use waiting() instead..."),
    row(
        lambda _: t.StepTimer().keep(3, world_size=2),
        "steps are balanced over 2 ranks, but the StepTimer measures 1;...",
    ),
    row(lambda _: t.StallWatch(0), "StallWatch: seconds must be above 0 and finite, got 0"),
    row(lambda _: t.StallWatch(float("nan")), "StallWatch: seconds must be above 0 and finite, got nan"),
    row(lambda _: t.MemoryWatch("cuda", min_free_gib=-1.0), "MemoryWatch: min_free_gib must be at least 0, got -1.0"),
    row(lambda _: t.MemoryWatch("cuda", max_unallocated=1.1), "...max_unallocated must be at least 0 and at most 1..."),
    row(lambda _: t.MemoryWatch("cpu"), "...device is cpu; memory is watched on cuda..."),
]
