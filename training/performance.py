"""Performance: FLOPs of a batch from its lengths, peaks of devices, and times of each attention layer.

FLOPs are the floating-point operations of matrix products: one of [m, k] and [k, n] takes 2 m k n. Norms, activations,
gates, softmax, position buckets and embedding lookups are left out, as in the model FLOPs by which utilization is
defined (Chowdhery et al., 2022, "PaLM", appendix B). FLOPs are linear in three counts:

    tokens        rows of the linear layers
    pairs         pairs of tokens of which the first attends to the second: scores and weighted values
    predictions   rows of the head, the loss tokens

Wasted operations, on padding or masked pairs, are not counted; neither is recomputation.

Peaks are dense, with fp32 accumulation: datasheets often print twice as much, which needs weights with 2:4 sparsity.
Devices under load may not reach the boost clock at which they hold. Peaks of a device that is not in the table, or of
part of one (MIG), are computed from its multiprocessors and maximum clock.
"""

import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from evenrank.core.errors import ConfigError
from evenrank.core.rules import Count
from evenrank.core.settings import check_types
from evenrank.dataloader.balance.ranks.agree import gather_checked
from evenrank.dataloader.balance.ranks.process_group import Group, process_group_of
from evenrank.dataloader.batches.batch import SequenceBatch
from evenrank.datasets.schema import ACTION, ITEM_ID

Scalar = int | Tensor
"""An int, or an int64 scalar on any device, so that counting on a GPU does not wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Operations of a forward and a backward pass."""

    linear_forward: Scalar
    linear_backward: Scalar
    """Twice the forward's: each product A B has the gradients of A and of B, of the same size."""
    attention_forward: Scalar
    """Of scores and weighted values."""
    attention_backward: Scalar
    """Twice the forward's, or 2.5 times; see `with_recomputed_scores`."""

    @property
    def forward(self) -> Scalar:
        """Of linear layers and attention."""
        return self.linear_forward + self.attention_forward

    @property
    def backward(self) -> Scalar:
        """Of linear layers and attention."""
        return self.linear_backward + self.attention_backward

    @property
    def total(self) -> Scalar:
        """Forward and backward."""
        return self.forward + self.backward

    def with_recomputed_scores(self) -> Self:
        """Scalar the scores that fused kernels compute again in the backward pass: 5 products there, after 2.

        This is for the speed of kernels (Dao, 2023, "FlashAttention-2", section 4.1); MFU is defined without them.
        """
        return dataclasses.replace(self, attention_backward=self.attention_forward * 5 // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The counts of a batch in which FLOPs are linear."""

    tokens: Scalar
    pairs: Scalar
    """Pairs of tokens of which the first attends to the second, itself included; per head and layer."""
    predictions: Scalar
    """Rows of the head, such as candidates or loss tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Forward FLOPs of a model per unit of its work; see `hstu_flops` and `decoder_flops`."""

    per_token: int
    """Of all linear layers that each token passes through."""
    per_pair: int
    """Of all attention layers and heads: 4 heads head_dim each layer."""
    per_prediction: int = 0
    """Of the head."""

    def of(self, work: Work) -> Flops:
        """Return the FLOPs of a step; scalars on a device where the counts are."""
        linear = self.per_token * work.tokens + self.per_prediction * work.predictions
        attention = self.per_pair * work.pairs
        return Flops(
            linear_forward=linear,
            linear_backward=2 * linear,
            attention_forward=attention,
            attention_backward=2 * attention,
        )


def mlp_flops(widths: Sequence[int]) -> int:
    """Return the forward FLOPs of a row through linear layers of these widths, the input's first."""
    return sum(2 * inner * outer for inner, outer in pairwise(widths))


def hstu_flops(
    *,
    hidden: Count,
    heads: Count,
    head_dim: Count,
    layers: Count,
    embedding: Sequence[int] = (),
    head: Sequence[int] = (),
) -> ModelFlops:
    """Return the FLOPs of an HSTU model (Zhai et al., 2024): in each layer, one linear to U, V, Q, K and one back.

    Args:
        hidden: width of the residual stream.
        heads: attention heads of a layer; of this rank, if they are distributed in tensor parallelism.
        embedding: widths of the MLP between embedding and first layer, such as (128, 256, 256).
        head: widths of the MLP of a prediction, such as (256, 512, tasks), or (hidden, scored items) for a sampled
            softmax with negatives of its own for each prediction.
    """
    check_types(hstu_flops, locals())
    width = heads * head_dim
    per_token = mlp_flops(embedding) + layers * (mlp_flops((hidden, 4 * width)) + mlp_flops((width, hidden)))
    return ModelFlops(per_token=per_token, per_pair=layers * 4 * width, per_prediction=mlp_flops(head))


def decoder_flops(
    *, hidden: Count, heads: Count, head_dim: Count, layers: Count, ffn_hidden: Count, head: Sequence[int] = ()
) -> ModelFlops:
    """Return the FLOPs of a decoder with softmax attention and a feed-forward network of two linears, as in SASRec.

    See `hstu_flops`; `ffn_hidden` is the inner width of the feed-forward network.
    """
    check_types(decoder_flops, locals())
    width = heads * head_dim
    layer = mlp_flops((hidden, 3 * width)) + mlp_flops((width, hidden)) + mlp_flops((hidden, ffn_hidden, hidden))
    return ModelFlops(per_token=layers * layer, per_pair=layers * 4 * width, per_prediction=mlp_flops(head))


def hstu_pairs(history: Tensor, contextual: Tensor, candidates: Tensor) -> Tensor:
    """Return the number of pairs of each sample's tokens of which the first attends to the second: int64 [B].

    Contextual tokens attend to one another and the whole history; tokens of the history to themselves and earlier ones;
    candidates to the history and themselves. With 3 tokens of history, 1 of them contextual, and 2 candidates:

        contextual   x x x
        history      x x
                     x x x
        candidates   x x x x
                     x x x   x

    All are integers [B]; `history` includes `contextual`.
    """
    history, contextual, candidates = history.long(), contextual.long(), candidates.long()
    causal = (history * (history + 1) - contextual * (contextual + 1)) // 2
    return causal + contextual * history + candidates * (history + 1)


def hstu_work(history: Tensor, contextual: Tensor, candidates: Tensor, *, predictions: Scalar) -> Work:
    """Return the work of an HSTU model on samples of the lengths of `hstu_pairs`, without waiting for their device.

    `predictions` are `batch.loss_tokens` for most models.
    """
    pairs = hstu_pairs(history, contextual, candidates).sum()
    return Work(tokens=(history + candidates).long().sum(), pairs=pairs, predictions=predictions)


def causal_work(tokens: Tensor, *, predictions: Scalar) -> Work:
    """Return the work of a causal decoder on samples of `tokens` (integers [B]), without waiting for their device."""
    tokens = tokens.long()
    return Work(tokens=tokens.sum(), pairs=(tokens * (tokens + 1) // 2).sum(), predictions=predictions)


def batch_work(batch: SequenceBatch, *, interleave_actions: bool, contextual: Sequence[str] = ()) -> Work:
    """Return the work of an HSTU model on a batch, as scalars on the batch's device, without waiting for it.

    Contextual tokens attend to the whole history, unless it has loss tokens: in retrieval, and with labels of the
    history, they would reveal its future, so they attend only to earlier ones.

    With `interleave_actions`, each action is a token of its own after its item; see `HSTUCost`. The values of the keys
    `contextual` are tokens in front of the history.
    """
    items, candidates = _lengths(batch, ITEM_ID), batch.num_candidates
    history = items - candidates
    if interleave_actions:
        actions = _lengths(batch, ACTION)  # of the first items: of the history alone, or of the candidates as well
        candidate_actions = (actions - history).clamp(min=0).minimum(candidates)
        history = history + actions - candidate_actions
        candidates = candidates + candidate_actions
    front = sum((_lengths(batch, key) for key in contextual), torch.zeros_like(items))
    if batch.labels is None:  # retrieval: each item is predicted
        sees_history = torch.zeros_like(front)
    else:
        sees_history = front.masked_fill(batch.labels.lengths() > batch.num_candidates, 0)
    return hstu_work(history + front, sees_history, candidates, predictions=batch.loss_tokens)


def _lengths(batch: SequenceBatch, key: str) -> Tensor:
    keys = batch.features.keys()
    if key not in keys:
        raise ConfigError(f"the work needs the key {key!r}; batches have {', '.join(keys)}")
    lengths: Tensor = batch.features.lengths().view(len(keys), -1)[keys.index(key)]
    return lengths.long()


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePeaks:
    """Peak FLOP/s by dtype, None where tensor cores do not support it, and memory bandwidth of a device."""

    fp32: float
    """Without tensor cores."""
    tf32: float | None = None
    """Of float32 on tensor cores (`torch.set_float32_matmul_precision("high")`)."""
    fp16: float
    bf16: float | None = None
    fp8: float | None = None
    bandwidth: float | None
    """Bytes per second; None: unknown."""
    source: str
    """The source of the figures."""

    def flops(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Return the FLOP/s of matrix products of a dtype; `tf32`: products of float32 use TF32.

        Raises:
            ConfigError: the device has no peak for it.
        """
        peaks = {
            torch.float32: self.tf32 if tf32 else self.fp32,
            torch.float16: self.fp16,
            torch.bfloat16: self.bf16,
            torch.float8_e4m3fn: self.fp8,
            torch.float8_e5m2: self.fp8,
        }
        if (peak := peaks.get(dtype)) is None:
            kind = "TF32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
            raise ConfigError(f"no peak is known for {kind} on this device ({self.source}); pass it in FLOP/s")
        return peak


_VOLTA = "NVIDIA V100 datasheet, January 2020"
_A100 = "NVIDIA A100 datasheet, June 2021"
_H100 = "NVIDIA H100 datasheet, 2023, and H100 whitepaper, table 2"
_H200 = "NVIDIA H200 datasheet, 2024"
_BLACKWELL = "NVIDIA Blackwell architecture technical brief, 2024, table 3, and HGX B200 datasheet"
_ULTRA = "NVIDIA HGX B300 and GB300 NVL72 datasheets, 2025"
_GEFORCE = "NVIDIA Ada and RTX Blackwell whitepapers, appendix A"
_CDNA3 = "AMD Instinct MI300X and MI325X data sheets, 2023 and 2024"

# The whole name without "NVIDIA", "Tesla" or "AMD" in front: "L4" must not match an L40, nor "H200" a MIG slice of it.
# TFLOP/s in fp32, tf32, fp16 and fp8, and GB/s.
_TABLE: tuple[tuple[str, float, float | None, float, float | None, float, str], ...] = (
    (r"V100-SXM\d-\d+GB(-LS)?", 15.7, None, 125, None, 900, _VOLTA),
    (r"V100-PCIE-\d+GB", 14, None, 112, None, 900, _VOLTA),
    (r"V100S-PCIE-\d+GB", 16.4, None, 130, None, 1134, _VOLTA),
    (r"T4", 8.1, None, 65, None, 320, "NVIDIA T4 datasheet, 2019"),
    (r"A[18]00-SXM\d?-80GB", 19.5, 156, 312, None, 2039, _A100),
    (r"A[18]00-SXM\d?-\d+GB", 19.5, 156, 312, None, 1555, _A100),
    (r"A[18]00 80GB PCIe", 19.5, 156, 312, None, 1935, _A100),
    (r"A[18]00-PCI[Ee]-40GB", 19.5, 156, 312, None, 1555, _A100),
    (r"A30", 10.3, 82, 165, None, 933, "NVIDIA A30 datasheet, 2021"),
    (r"A10", 31.2, 62.5, 125, None, 600, "NVIDIA A10 datasheet, 2021"),
    # Another chip than the A10, with half its tensor cores' rate.
    (r"A10G", 35, 35, 70, None, 600, "NVIDIA A10G datasheet, 2021"),
    (r"A40", 37.4, 74.8, 149.7, None, 696, "NVIDIA A40 datasheet, 2021"),
    (r"L4", 30.3, 60, 121, 242.5, 300, "NVIDIA L4 datasheet, 2023"),
    (r"L40", 90.5, 90.5, 181.05, 362, 864, "NVIDIA L40 datasheet, 2022"),
    (r"L40S", 91.6, 183, 362.05, 733, 864, "NVIDIA L40S datasheet, 2023"),
    (r"GeForce RTX 4090", 82.6, 82.6, 165.2, 330.3, 1008, _GEFORCE),
    (r"GeForce RTX 5090", 104.8, 104.8, 209.5, 419, 1792, _GEFORCE),
    (r"H100 80GB HBM3|H800", 66.9, 494.7, 989.4, 1978.9, 3350, _H100),
    (r"H[18]00 PCIe", 51.2, 378, 756, 1513, 2000, _H100),
    (r"H100 NVL", 60, 417.5, 835.5, 1670.5, 3900, _H100),
    (r"GH200 (120|480)GB", 66.9, 494.7, 989.4, 1978.9, 4000, "NVIDIA GH200 datasheet, 2023"),
    (r"GH200 144G HBM3e", 66.9, 494.7, 989.4, 1978.9, 4900, "NVIDIA GH200 datasheet, 2023"),
    (r"H200", 66.9, 494.7, 989.4, 1978.9, 4800, _H200),
    (r"H200 NVL", 60, 417.5, 835.5, 1670.5, 4800, _H200),
    (r"H20", 44, 74, 148, 296, 4000, "NVIDIA H20 product brief, 2024"),
    (r"H20-3e", 44, 74, 148, 296, 4800, "NVIDIA H20 product brief, 2024, with the memory of the H200"),
    (r"B100", 60, 900, 1750, 3500, 8000, _BLACKWELL),
    (r"B200", 75, 1125, 2250, 4500, 7700, _BLACKWELL),
    (r"GB200", 80, 1250, 2500, 5000, 8000, _BLACKWELL),
    (r"B300( SXM6( AC)?)?", 75, 1125, 2250, 4500, 8000, _ULTRA),
    (r"GB300", 80, 1250, 2500, 5000, 8000, _ULTRA),
    (r"Instinct MI300X( OAM)?( VF)?", 163.4, 653.7, 1307.4, 2614.9, 5300, _CDNA3),
    (r"Instinct MI325X( OAM)?( VF)?", 163.4, 653.7, 1307.4, 2614.9, 6000, _CDNA3),
)

# Operations per clock and multiprocessor, by compute capability: without tensor cores, and on tensor cores in 16 bits
# (NVIDIA's whitepapers of V100, T4, A100, GA102, AD102, H100 and Blackwell). GeForce chips of 8.6, 8.9 and 12.0 reach
# half of that on tensor cores, so that their utilization is computed too low.
_PER_CLOCK = {
    (7, 0): (128, 1024),
    (7, 5): (128, 1024),
    (8, 0): (128, 2048),
    (8, 6): (256, 1024),
    (8, 9): (256, 1024),
    (9, 0): (256, 4096),
    (10, 0): (256, 8192),
    (10, 3): (256, 8192),
    (12, 0): (256, 1024),
}


def peaks_by_name(name: str) -> DevicePeaks | None:
    """Return the peaks of a device by its name in `torch.cuda.get_device_name`; None if it is not in the table."""
    bare = re.sub(r"^(NVIDIA|Tesla|AMD) ", "", name.strip())
    for pattern, fp32, tf32, fp16, fp8, gigabytes, source in _TABLE:
        if re.fullmatch(pattern, bare):
            return DevicePeaks(
                fp32=fp32 * 1e12,
                tf32=tf32 and tf32 * 1e12,
                fp16=fp16 * 1e12,
                bf16=tf32 and fp16 * 1e12,  # the same devices have both
                fp8=fp8 and fp8 * 1e12,
                bandwidth=gigabytes * 1e9,
                source=source,
            )
    return None


def computed_peaks(
    capability: tuple[int, int], multiprocessors: int, clock: float, *, bandwidth: float | None = None
) -> DevicePeaks:
    """Compute the peaks of an NVIDIA device: operations per clock and multiprocessor, times both.

    `capability` is such as (9, 0), the `clock` in Hz, and the `bandwidth` of the memory in bytes per second.

    Raises:
        ConfigError: nothing is known of this capability.
    """
    if capability not in _PER_CLOCK:
        known = ", ".join(f"{major}.{minor}" for major, minor in _PER_CLOCK)
        raise ConfigError(
            f"the compute capability is {capability[0]}.{capability[1]}, whose operations per clock are not "
            f"known, only those of {known}; pass the device's peak in FLOP/s"
        )
    plain, tensor = (operations * multiprocessors * clock for operations in _PER_CLOCK[capability])
    return DevicePeaks(
        fp32=plain,
        tf32=tensor / 2 if capability >= (8, 0) else None,
        fp16=tensor,
        bf16=tensor if capability >= (8, 0) else None,
        fp8=2 * tensor if capability >= (8, 9) else None,
        bandwidth=bandwidth,
        source=f"computed from {multiprocessors} multiprocessors at {clock / 1e9:.2f} GHz",
    )


def device_peaks(device: torch.device | str | int | None = None) -> DevicePeaks:
    """Return the peaks of a CUDA device, by default the current one, from the table or computed at its maximum clock.

    Raises:
        ConfigError: the peaks are not known.
    """
    if isinstance(device, str | torch.device) and torch.device(device).type != "cuda":
        raise ConfigError(f"no peaks are known of the device {device}; pass a CUDA device, or its peak in FLOP/s")
    properties = torch.cuda.get_device_properties(device)
    if (known := peaks_by_name(properties.name)) is not None:
        return known
    clock = getattr(properties, "clock_rate", None)  # kHz; not in all versions of PyTorch, nor on all platforms
    if torch.version.hip or not clock:
        raise ConfigError(f"the peaks of {properties.name!r} are not known; pass its peak in FLOP/s")
    memory_clock = getattr(properties, "memory_clock_rate", 0)  # kHz, with two transfers per clock
    return computed_peaks(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        clock * 1e3,
        bandwidth=2 * memory_clock * 1e3 * getattr(properties, "memory_bus_width", 0) / 8 or None,
    )


LayerFlops = Callable[[nn.Module, Mapping[str, Any]], Flops]
"""From a layer, and the arguments of a call of its forward by name, to the call's FLOPs."""


class Clock:
    """Marks points in time on a device.

    Marks are CUDA events in the current stream, which in a backward pass is that of the forward pass; on the CPU, whose
    work is done when a call returns, they are times of the host.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def mark(self) -> Any:
        """Return a mark that the device passes after all work so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: Any) -> bool:
        """Return whether the device has passed a mark, without waiting for it."""
        return self._device.type != "cuda" or bool(mark.query())

    def milliseconds(self, start: Any, stop: Any) -> float:
        """Return the time between two marks that have been passed."""
        return float(start.elapsed_time(stop) if self._device.type == "cuda" else 1e3 * (stop - start))

    def wait(self) -> None:
        """Wait until all marks have been passed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    """Marks of one call of a layer; None where nothing has happened."""

    is_forward: bool  # False if activation checkpointing repeats a forward pass
    forward_start: Any = None
    forward_stop: Any = None
    backward_start: Any = None
    backward_stop: Any = None
    flops: Flops | None = None


def _attach_hooks(
    layer: nn.Module, clock: Clock, flops: LayerFlops | None, calls: list[_Call]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Attach forward hooks to a layer, which append the marks of each call to `calls`."""
    signature = inspect.signature(layer.forward)
    unfinished: _Call | None = None  # checkpointing may end a forward pass that it repeats half way

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal unfinished
        unfinished = None
        if not module.training:
            return None
        # Not -1 while this thread is in a backward pass: the forward pass is being repeated there.
        call = _Call(is_forward=torch._C._current_graph_task_id() == -1)
        args, kwargs = _observe((args, kwargs), lambda: setattr(call, "backward_stop", clock.mark()))
        unfinished = call
        call.forward_start = clock.mark()
        return args, kwargs

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        nonlocal unfinished
        call, unfinished = unfinished, None
        if call is None:
            return None
        call.forward_stop = clock.mark()
        calls.append(call)
        if flops is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            with torch.no_grad():
                call.flops = flops(module, bound.arguments)
        return _observe(output, lambda: setattr(call, "backward_start", clock.mark()))

    return (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, with_kwargs=True),
    )


class _Observed(torch.autograd.Function):
    """The identity; calls a function when all gradients have arrived in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.function()
        return (None, *gradients)


def _observe(value: Any, function: Callable[[], None]) -> Any:
    """Return the value with all tensors that require a gradient observed together, also in tuples, lists and dicts."""
    leaves, structure = tree_flatten(value, is_leaf=lambda item: type(item) not in (tuple, list, dict))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places or not torch.is_grad_enabled():
        return value
    observed = _Observed.apply(function, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, observed, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, structure)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTiming:
    """Mean times and speeds of a layer on a rank; None of passes that did not happen, or without a FLOPs function."""

    rank: int
    """In the default process group."""
    layer: str
    """Name of the module in the model."""
    calls: int
    """Forward passes in the interval."""
    forward_ms: float
    backward_ms: float | None
    forward_tflops: float | None
    """TFLOP/s."""
    backward_tflops: float | None
    mfu: float | None
    """FLOP/s of all passes over the device's peak, 0 to 1; None if either is unknown."""

    def line(self) -> str:
        """Return it as a line of a table."""
        parts = [f"rank {self.rank}", self.layer, f"{self.calls} calls"]
        for name in ("forward", "backward"):
            ms, tflops = getattr(self, f"{name}_ms"), getattr(self, f"{name}_tflops")
            if ms is not None:
                parts.append(f"{name} {ms:.3f} ms" + ("" if tflops is None else f", {tflops:.1f} TFLOP/s"))
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        return " | ".join(parts)


class AttentionTracker:
    """Times each attention layer of a model on `device` in the steps start..stop-1, counted from 0.

        tracker = AttentionTracker(model, HSTUAttention, device=device, start=10, stop=20, flops=attention_flops)
        for batch in balancer:
            train(batch)
            for timing in tracker.step():
                print(timing.line())

    Layers have hooks within the interval alone. On a GPU, times are measured with CUDA events, which are read after the
    interval: nothing within it waits for the device.

    The time of a backward pass is from the arrival of the last gradient of the outputs to that of the last gradient of
    the inputs, including forward passes that activation checkpointing repeats meanwhile. There is none if no tensor
    argument requires a gradient. Tensors may be in tuples, lists and dicts; other arguments and outputs are passed on.
    Calls of layers in evaluation mode (`model.eval()`) do not count. Within the interval, a layer must not modify its
    arguments in place, nor its caller the outputs. In a compiled model, track modules that are not compiled.

    Args:
        layers: a type of module, several of them, or a pattern of names in which * stands for anything, such as
            `encoder.layers.*.attention`.
        flops: FLOPs of a call, from the layer and its arguments by the names of the parameters of its `forward`,
            however they were passed; counts may be scalars on the device. None: there are only times.
        peak_flops: FLOP/s of the device; see `device_peaks`. None: there is no MFU.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: type[nn.Module] | tuple[type[nn.Module], ...] | str,
        *,
        device: torch.device | str,
        start: int,
        stop: int,
        flops: LayerFlops | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if not 0 <= start < stop:
            raise ConfigError(
                f"the interval of steps is [{start}, {stop}); it must begin at 0 or later and not be empty"
            )
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if (fnmatchcase(name, layers) if isinstance(layers, str) else isinstance(module, layers))
        }
        if not self._layers:
            kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ConfigError(f"no module of the model matches {layers!r}; it has modules of the types {kinds}")
        self._clock = Clock(device)
        self._start, self._stop = start, stop
        self._flops, self._peak_flops = flops, peak_flops
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._handles: list[RemovableHandle] = []
        self._calls: dict[str, list[_Call]] = {name: [] for name in self._layers}
        self._num_steps = 0
        self._is_detached = False
        if start == 0:
            self._attach()

    def step(self) -> list[LayerTiming]:
        """Record the end of a step; call it after each one.

        After the interval's last step, it waits for the device and returns a row for each layer that was called, in the
        order of the model; after all others, nothing.
        """
        self._num_steps += 1
        if self._is_detached:
            return []
        if self._num_steps == self._start:
            self._attach()
        if self._num_steps != self._stop:
            return []
        self.detach()
        self._clock.wait()
        timings = [self._timing(name, calls) for name, calls in self._calls.items() if calls]
        self._calls.clear()
        return timings

    def detach(self) -> None:
        """Remove all hooks for good; there will be no rows."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_detached = True

    def _attach(self) -> None:
        for name, module in self._layers.items():
            self._handles += _attach_hooks(module, self._clock, self._flops, self._calls[name])

    def _timing(self, name: str, calls: Sequence[_Call]) -> LayerTiming:
        forward = [call for call in calls if call.is_forward]
        backward = [call for call in calls if call.backward_start is not None and call.backward_stop is not None]
        forward_ms = sum(self._clock.milliseconds(call.forward_start, call.forward_stop) for call in forward)
        backward_ms = sum(self._clock.milliseconds(call.backward_start, call.backward_stop) for call in backward)
        forward_flops = sum(int(call.flops.forward) for call in forward if call.flops)
        backward_flops = sum(int(call.flops.backward) for call in backward if call.flops)
        mfu = None
        if self._flops and self._peak_flops:
            mfu = 1e12 * _tflops(forward_flops + backward_flops, forward_ms + backward_ms) / self._peak_flops
        return LayerTiming(
            rank=self._rank,
            layer=name,
            calls=len(forward),
            forward_ms=forward_ms / max(len(forward), 1),
            backward_ms=backward_ms / len(backward) if backward else None,
            forward_tflops=_tflops(forward_flops, forward_ms) if self._flops else None,
            backward_tflops=_tflops(backward_flops, backward_ms) if self._flops and backward else None,
            mfu=mfu,
        )


def gather_timings(timings: Sequence[LayerTiming], *, group: Group | None = None) -> list[LayerTiming]:
    """Return the rows of all ranks of the group, in their order. Collective: every rank must call this."""
    return list(chain.from_iterable(gather_checked({}, list(timings), process_group_of(group))))


def _tflops(flops: int, milliseconds: float) -> float:
    return flops / milliseconds / 1e9 if milliseconds else 0.0
