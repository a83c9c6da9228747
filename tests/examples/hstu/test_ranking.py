import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingCollection

from evenrank.core.errors import ConfigError
from evenrank.training import label_bits
from hstu.config import tables
from hstu.ranking import at_least
from tests.examples.hstu.exactness import gradients_of
from tests.examples.hstu.samples import (
    CONFIG,
    NUM_TASKS,
    SIZES,
    Sample,
    make_batch,
    make_ranking,
    make_retrieval,
    random_samples,
)

SAMPLE = Sample(user_id=[3], tags=[1, 2], item_id=[4, 5, 6, 7, 8], action=[1, 2, 3], num_candidates=2, labels=[5, 6])


def _logits(sample: Sample) -> Tensor:
    logits: Tensor = make_ranking()(make_batch([sample]))[1]
    return logits.detach()


def _changed(values: list[int], index: int) -> list[int]:
    return [*values[:index], values[index] - 1, *values[index + 1 :]]


def _is_equal(logits: Tensor, others: Tensor) -> list[bool]:
    return torch.isclose(logits, others, rtol=1e-12, atol=0).all(1).tolist()


def test_candidates_depend_neither_on_each_other_nor_on_their_order_nor_on_actions() -> None:
    logits = _logits(SAMPLE)
    assert _is_equal(logits, _logits(replace(SAMPLE, item_id=_changed(SAMPLE.item_id, 3)))) == [False, True]
    assert _is_equal(logits, _logits(replace(SAMPLE, item_id=_changed(SAMPLE.item_id, 4)))) == [True, False]
    assert _is_equal(logits, _logits(replace(SAMPLE, item_id=[4, 5, 6, 8, 7])).flip(0)) == [True, True]
    first, second = (_logits(replace(SAMPLE, action=[1, 2, 3, *actions])) for actions in ([4, 5], [0, 1]))
    assert _is_equal(first, second) == [True, True]


def test_candidates_see_the_whole_history_and_the_context() -> None:
    logits = _logits(SAMPLE)
    for name, count in (("user_id", 1), ("tags", 2), ("action", 3), ("item_id", 3)):
        for index in range(count):
            change: Any = {name: _changed(getattr(SAMPLE, name), index)}
            assert _is_equal(logits, _logits(replace(SAMPLE, **change))) == [False, False], (name, index)


def test_a_label_of_the_history_cannot_be_known_before_it_happens() -> None:
    sample = Sample(user_id=[3], tags=[1, 2], item_id=[4, 5, 6, 7], action=[1, 2, 3, 4], labels=[1, 2, 3, 4])
    logits = _logits(sample)
    for index in range(4):
        changed = replace(sample, item_id=_changed(sample.item_id, index))
        assert _is_equal(logits, _logits(changed)) == [step < index for step in range(4)]
        changed = replace(sample, action=_changed(sample.action, index))
        # Its own logit is that of the item's token, which comes first.
        assert _is_equal(logits, _logits(changed)) == [step <= index for step in range(4)]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), data=st.data(), predict=st.sampled_from(["candidates", "history"]))
def test_logits_do_not_depend_on_the_other_samples_of_a_batch(seed: int, data: st.DataObject, predict: str) -> None:
    samples = random_samples(5, seed=seed, predict=predict)
    model = make_ranking()

    def by_sample(rows: list[int], padding: int) -> dict[int, Tensor]:
        batch = make_batch([samples[row] for row in rows], rows=len(rows) + padding)
        assert batch.labels is not None
        counts = batch.labels.lengths().tolist()[: len(rows)]
        return dict(zip(rows, torch.split(model(batch)[1].detach(), counts), strict=True))

    together = by_sample(list(range(5)), 0)
    order = data.draw(st.permutations(range(5)))
    cut = data.draw(st.integers(1, 4))
    for rows in (order[:cut], order[cut:]):
        for row, logits in by_sample(rows, data.draw(st.integers(0, 3))).items():
            torch.testing.assert_close(logits, together[row], rtol=1e-12, atol=1e-12)


def test_loss_sums_are_those_of_the_tasks() -> None:
    batch = make_batch(random_samples(4))
    assert batch.labels is not None
    loss_sums, logits = make_ranking()(batch)
    targets = label_bits(batch.labels["label"].values(), NUM_TASKS).double()
    assert logits.shape == targets.shape == (batch.loss_tokens, NUM_TASKS)
    for task in range(NUM_TASKS):
        expected = binary_cross_entropy_with_logits(logits[:, task], targets[:, task], reduction="sum")
        torch.testing.assert_close(loss_sums[task], expected)
    assert at_least(7)(torch.tensor([6, 7, 9])).tolist() == [[0], [1], [1]]  # one binary task


def test_a_batch_without_samples_gives_every_parameter_a_zero_gradient() -> None:
    for config in (CONFIG, replace(CONFIG, recompute=True)):
        model = make_ranking(config)
        loss_sums, logits = model(make_batch([], rows=3))
        assert logits.shape == (0, NUM_TASKS)
        loss_sums.sum().backward()
        assert not any(gradient.any() for gradient in gradients_of(model))


def test_mistakes_are_refused() -> None:
    with pytest.raises(ConfigError, match="no labels; set max_num_candidates or num_tasks of its LoaderConfig"):
        make_ranking()(make_batch([Sample(item_id=[1], action=[1])]))
    with pytest.raises(ConfigError, match=r"targets returned \[6\] for 6 labels; it must return \[n, 3\]"):
        make_ranking(targets=lambda labels: (labels > 2).float())(make_batch(random_samples(3)))
    with pytest.raises(ConfigError, match="num_tasks must be at least 1, got 0"):
        make_ranking(num_tasks=0)


@pytest.mark.gpu
def test_automatic_attention_has_kernels_or_pads() -> None:
    for head_dim, expected in ((CONFIG.head_dim, "padded"), (64, "triton")):
        batch = make_batch(random_samples(4)).to("cuda")
        logits = []
        for attention in ("auto", expected):
            torch.manual_seed(0)
            model = make_ranking(replace(CONFIG, attention=attention, head_dim=head_dim))
            model.embeddings = EmbeddingCollection(tables=tables(SIZES, CONFIG))
            logits.append(model.float().cuda()(batch)[1])
        assert torch.equal(*logits)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["padded", "triton"])
@pytest.mark.parametrize("task", ["ranking", "retrieval"])
def test_a_step_does_not_synchronize(task: str, attention: str, recompute: bool) -> None:
    head_dim = CONFIG.head_dim if attention == "padded" else 64
    config = replace(CONFIG, attention=attention, head_dim=head_dim, recompute=recompute, dropout=0.1)
    retrieval = task == "retrieval"
    model: nn.Module = make_retrieval(config) if retrieval else make_ranking(config)
    model.embeddings = EmbeddingCollection(tables=tables(SIZES, config, retrieval=retrieval))
    model.float().cuda()
    samples = random_samples(8, predict="next" if retrieval else "candidates")
    batch = make_batch(samples, rows=10).to("cuda")
    for mode in ("default", "error"):  # the first step loads libraries
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model(batch)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(gradient.isfinite().all() for gradient in gradients_of(model))


def test_the_first_block_of_the_readme_trains(small_dataset: Path) -> None:
    readme = Path(__file__).parents[3] / "examples" / "hstu" / "README.md"
    (block, *_) = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"path": small_dataset}
    exec(block, names)
    assert names["logits"].shape == (names["batch"].loss_tokens, 1)
    assert all(torch.any(parameter.grad) for parameter in names["model"].dense.encoder.layers.parameters())
