import pytest
import torch
from torch import Tensor

from semantic_ids.attention import causal_attention, jagged_attention, padded_attention
from semantic_ids.tokens import BOS, Sequences, lay_out
from tests.examples.semantic_ids.samples import batch_of, random_samples

SIZES = (4, 5, 6)


def _sequences(max_history: int = 7) -> Sequences:
    batch = batch_of(random_samples(6, SIZES, max_history=max_history), SIZES, batch_size=8)
    return lay_out(batch, ("semantic_id", BOS, "candidate_id")).sequences


def _inputs(sequences: Sequences, head_dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(len(sequences.rows), 2, head_dim, dtype=dtype) for _ in range(3)]


def test_each_token_sees_itself_and_those_before_it_in_its_sample() -> None:
    sequences = _sequences()
    query, key, value = _inputs(sequences, 8)
    out = causal_attention(query, key, value, sequences)
    for begin, end in zip(sequences.offsets[:-1].tolist(), sequences.offsets[1:].tolist(), strict=True):
        for token in range(begin, end):
            scores = torch.einsum("hd,nhd->hn", query[token], key[begin : token + 1]) / 8**0.5
            expected = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), value[begin : token + 1])
            torch.testing.assert_close(out[token], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_jagged_attention_equals_padded_attention(dtype: torch.dtype, head_dim: int) -> None:
    sequences = _sequences(max_history=60)
    tensors = {name: getattr(sequences, name).cuda() for name in ("offsets", "rows", "positions")}
    on_gpu = Sequences(**tensors, max_length=sequences.max_length + 5)  # a bound, not the longest
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for attention, place, kind in (
        (padded_attention, sequences, torch.float64),
        (padded_attention, on_gpu, dtype),
        (jagged_attention, on_gpu, dtype),
    ):
        inputs = [one.to(dtype).to(place.offsets.device, kind).requires_grad_() for one in _inputs(sequences, head_dim)]
        query, key, value = inputs
        if attention is jagged_attention:
            attention(query, key, value, place)  # the first call may compile or allocate
            torch.cuda.set_sync_debug_mode("error")
        try:
            out = attention(query, key, value, place)
            gradients = torch.autograd.grad(out.square().sum(), inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([tensor.double().cpu() for tensor in (out, *gradients)])
    for exact, padded, jagged in zip(*results, strict=True):
        tolerance = 3 * (padded - exact).abs().max() + 1e-6
        assert (jagged - exact).abs().max() <= tolerance
