"""FLOPs from lengths are those that the matrix products of the example's attention and of torch's layers take."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu
from torch.utils.flop_counter import FlopCounterMode

from evenrank.core.errors import ConfigError
from evenrank.dataloader import SequenceBatch
from evenrank.dataloader.balance import HSTUCost
from evenrank.dataloader.batch import keyed_jagged_tensor
from evenrank.training import (
    Flops,
    ModelFlops,
    Work,
    batch_work,
    causal_work,
    decoder_flops,
    hstu_flops,
    hstu_pairs,
    hstu_work,
)
from hstu.attention import Sequences, padded_attention

HIDDEN, HEADS, HEAD_DIM, LAYERS = 16, 2, 12, 3
EMBEDDING, HEAD = (8, 24, HIDDEN), (HIDDEN, 20, 5)

SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4)


def _sequences(samples: list[tuple[int, int, int]]) -> tuple[Sequences, tuple[Tensor, Tensor, Tensor]]:
    """Return samples of (contextual, other history, candidates), and (history, contextual, candidates) [B]."""
    contextual, others, candidates = torch.tensor(samples).unbind(1)
    history = contextual + others
    lengths = history + candidates
    sequences = Sequences(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        num_contextual=contextual,
        num_candidates=candidates,
        num_tokens=int(lengths.sum()),
        max_length=max(int(lengths.max()), 1),
    )
    return sequences, (history, contextual, candidates)


@given(samples=SAMPLES)
def test_pairs_are_those_of_the_mask_of_the_example(samples: list[tuple[int, int, int]]) -> None:
    sequences, lengths = _sequences(samples)
    assert hstu_pairs(*lengths).tolist() == sequences.mask().sum((1, 2)).tolist()
    work = hstu_work(*lengths, predictions=7)
    assert (work.tokens, work.pairs, work.predictions) == (sequences.num_tokens, sequences.mask().sum(), 7)


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_pairs_of_a_decoder_are_those_of_a_triangle(tokens: list[int]) -> None:
    work = causal_work(torch.tensor(tokens, dtype=torch.int32), predictions=0)
    assert work.pairs == sum(int(torch.ones(n, n).tril().sum()) for n in tokens)
    assert work.tokens == sum(tokens)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(HIDDEN, 4 * HEADS * HEAD_DIM)
        self.outputs = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        projected = silu(self.inputs(layer_norm(x, (HIDDEN,)))).view(-1, 4, HEADS, HEAD_DIM)
        u, v, q, k = projected.unbind(1)
        attended = padded_attention(q, k, v, sequences, scale_length=sequences.max_length).flatten(1)
        return x + self.outputs(layer_norm(attended, attended.shape[1:]) * u.flatten(1))  # type: ignore[no-any-return]


def _mlp(widths: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def _count(outputs: nn.Module, tokens: Tensor, *arguments: Sequences) -> tuple[int, int]:
    """Return torch's counts of a forward and a backward pass, whose input has a gradient too."""
    with FlopCounterMode(display=False) as forward:
        loss = outputs(tokens, *arguments).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


class _HSTU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = _mlp(EMBEDDING), _mlp(HEAD)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, sequences)
        return self.head(hidden)  # type: ignore[no-any-return]


def test_hstu_flops_are_those_that_torch_counts_where_no_pair_is_masked() -> None:
    samples, length = 4, 6
    sequences, _ = _sequences([(length, 0, 0)] * samples)  # contextual tokens see one another: no pair is masked
    tokens = torch.randn(samples * length, EMBEDDING[0], requires_grad=True)
    counted = _count(_HSTU(), tokens, sequences)

    model = hstu_flops(hidden=HIDDEN, heads=HEADS, head_dim=HEAD_DIM, layers=LAYERS, embedding=EMBEDDING, head=HEAD)
    each = torch.full((samples,), length)
    flops = model.of(hstu_work(each, each, torch.zeros_like(each), predictions=samples * length))
    assert (flops.forward, flops.backward) == counted


def test_hstu_flops_of_a_causal_history_leave_out_only_the_masked_pairs_that_torch_counts() -> None:
    samples, length = 4, 6
    sequences, lengths = _sequences([(1, 3, 2)] * samples)
    tokens = torch.randn(samples * length, EMBEDDING[0], requires_grad=True)
    counted = _count(_HSTU(), tokens, sequences)

    model = hstu_flops(hidden=HIDDEN, heads=HEADS, head_dim=HEAD_DIM, layers=LAYERS, embedding=EMBEDDING, head=HEAD)
    flops = model.of(hstu_work(*lengths, predictions=samples * length))
    masked = int((~sequences.mask()).sum())
    assert flops.forward + 4 * LAYERS * HEADS * HEAD_DIM * masked == counted[0]
    assert flops.backward + 8 * LAYERS * HEADS * HEAD_DIM * masked == counted[1]


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.inputs, self.outputs = nn.Linear(HIDDEN, 3 * width), nn.Linear(width, HIDDEN)
        self.ffn, self.head = _mlp((HIDDEN, 40, HIDDEN)), nn.Linear(HIDDEN, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.inputs(tokens).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):  # torch's counter does not know the fused kernel of the CPU
            attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.ffn(self.outputs(attended.transpose(1, 2).flatten(2))))  # type: ignore[no-any-return]


def test_decoder_flops_are_those_that_torch_counts_but_for_masked_pairs() -> None:
    samples, length = 3, 7
    counted = _count(_Decoder(), torch.randn(samples, length, HIDDEN, requires_grad=True))
    model = decoder_flops(hidden=HIDDEN, heads=HEADS, head_dim=HEAD_DIM, layers=1, ffn_hidden=40, head=(HIDDEN, 9))
    flops = model.of(causal_work(torch.full((samples,), length), predictions=samples * length))
    masked = samples * length * (length - 1) // 2
    assert flops.forward + 4 * HEADS * HEAD_DIM * masked == counted[0]
    assert flops.backward + 8 * HEADS * HEAD_DIM * masked == counted[1]


def test_recomputed_scores_make_attention_cost_three_and_a_half_times_its_forward_pass() -> None:
    flops = ModelFlops(per_token=10, per_pair=4, per_prediction=3).of(Work(tokens=5, pairs=7, predictions=2))
    assert flops == Flops(linear_forward=56, linear_backward=112, attention_forward=28, attention_backward=56)
    assert flops.total == 3 * flops.forward == 252
    recomputed = flops.with_recomputed_scores()
    assert recomputed.attention_forward + recomputed.attention_backward == 3.5 * 28
    assert recomputed.linear_backward == flops.linear_backward


def _batch(lengths: dict[str, list[int]], candidates: list[int]) -> SequenceBatch:
    rows = np.array(list(lengths.values()))
    features = keyed_jagged_tensor(list(lengths), torch.zeros(rows.sum(), dtype=torch.int64), rows)
    return SequenceBatch(
        batch_size=rows.shape[1],
        num_real=rows.shape[1] - 1,
        loss_tokens=11,
        features=features,
        num_candidates=torch.tensor(candidates),
        sample_ids=torch.arange(rows.shape[1]),
    )


@pytest.mark.parametrize("interleave_actions", [False, True])
@pytest.mark.parametrize("actions", [[3, 5, 0], [4, 7, 0]], ids=["of the history", "of all items"])
def test_the_work_of_a_batch_has_the_tokens_that_costs_count(interleave_actions: bool, actions: list[int]) -> None:
    lengths = {"gender": [1, 1, 0], "genres": [0, 2, 0], "item_id": [4, 7, 0], "action": actions}
    candidates = [1, 2, 0]
    batch = _batch(lengths, candidates)
    contextual = ("gender", "genres")
    work = batch_work(batch, interleave_actions=interleave_actions, contextual=contextual)

    cost = HSTUCost(
        hidden=1, heads=1, head_dim=1, layers=1, interleave_actions=interleave_actions, contextual=contextual
    )
    arrays = {key: np.array(values) for key, values in lengths.items()}
    tokens = torch.from_numpy(cost.tokens(arrays))
    candidate_tokens = torch.from_numpy(cost.candidate_tokens(arrays, np.array(candidates)))
    assert work.tokens == tokens.sum()
    assert work.pairs == hstu_pairs(tokens - candidate_tokens, torch.tensor([1, 3, 0]), candidate_tokens).sum()
    assert work.predictions == 11


def test_a_missing_key_is_an_error_that_names_those_of_the_batch() -> None:
    with pytest.raises(ConfigError, match="needs the key 'age'; batches have item_id, action"):
        batch_work(_batch({"item_id": [2, 0], "action": [2, 0]}, [0, 0]), interleave_actions=True, contextual=["age"])


def test_a_size_of_zero_is_an_error() -> None:
    with pytest.raises(ConfigError, match="heads must be at least 1, got 0"):
        hstu_flops(hidden=4, heads=0, head_dim=4, layers=1)
    with pytest.raises(ConfigError, match="ffn_hidden must be at least 1, got 0"):
        decoder_flops(hidden=4, heads=1, head_dim=4, layers=1, ffn_hidden=0)


def test_counts_stay_where_the_lengths_are() -> None:
    """On a device without values: reading one would fail, as it would wait for a GPU."""
    lengths = torch.zeros(3, dtype=torch.int64, device="meta")
    flops = hstu_flops(hidden=4, heads=1, head_dim=4, layers=1).of(hstu_work(lengths, lengths, lengths, predictions=3))
    assert isinstance(flops.total, Tensor)
    assert flops.total.device.type == "meta"
