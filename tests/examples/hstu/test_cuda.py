"""On GPUs: kernels where there are any, and no synchronization in a step."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection

from hstu.config import HSTUConfig, tables
from tests.examples.hstu.samples import CONFIG, SIZES, make_batch, make_ranking, make_retrieval, random_samples

PADDED = replace(CONFIG, attention="padded")
JAGGED = replace(CONFIG, attention="triton", head_dim=64)


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
@pytest.mark.parametrize("attention", [PADDED, JAGGED], ids=["padded", "triton"])
@pytest.mark.parametrize("task", ["ranking", "retrieval"])
def test_a_step_does_not_synchronize(task: str, attention: HSTUConfig, recompute: bool) -> None:
    config = replace(attention, recompute=recompute, dropout=0.1)
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
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
