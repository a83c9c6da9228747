"""TorchRec's training pipelines by name; `PIPELINES.register` adds others.

    none          TrainPipelineBase: copies the next batch to the device while this one trains
    sparse-dist   TrainPipelineSparseDist: also sends the ids of sharded tables to the ranks that hold their rows
    prefetch      PrefetchTrainPipelineSparseDist: also fills the device's caches of tables that are in host memory

All run the same forward, with the loss inside or outside the model, and `run_pipeline` drives them until the data end.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import ShardedModule

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStep(Generic[Batch]):
    """The result of a pipeline for a batch, on the device."""

    batch: Batch
    loss: Tensor
    """The scalar that the optimizer step minimized, detached."""
    output: Any
    """Of the model; without the loss, if the model computes it."""


class PipelineForward(Generic[Batch]):
    """A model and its loss (see `make_pipeline`) as one function of a batch, as TorchRec's pipelines call models."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Batch], Tensor] | None) -> None:
        self._model = model
        self._loss = loss

    @property
    def training(self) -> bool:
        """Whether pipelines call `backward` and step the optimizer."""
        return self._model.training

    def __call__(self, batch: Batch) -> tuple[Tensor, PipelineStep[Batch]]:
        """Return the loss and the pipeline's result for a batch."""
        output = self._model(batch)
        if self._loss is not None:
            loss = self._loss(output, batch)
        elif isinstance(output, tuple | list) and len(output) == 2:
            loss, output = output
        else:
            raise ConfigError(
                f"the model returned {type(output).__name__} instead of (loss, output); pass loss= to make_pipeline"
            )
        return loss, PipelineStep(batch=batch, loss=loss.detach(), output=output)


class Pipeline(Protocol[Batch]):
    """The interface of a pipeline; TorchRec's pipelines have it."""

    def progress(self, dataloader_iter: Iterator[Batch]) -> PipelineStep[Batch]:
        """Train or evaluate the next batch, pulling others ahead; raises StopIteration once all of them are done."""

    def reset(self) -> None:
        """Drop the batches that were pulled ahead; the next `progress` may be given another iterator."""


PipelineFactory = Callable[[nn.Module, torch.optim.Optimizer, torch.device, PipelineForward[Any]], Pipeline[Any]]
"""Makes a pipeline from the model, which it may rewrite, the optimizer, the device that batches are copied to, and the
forward to call with each batch."""

PIPELINES: Registry[PipelineFactory] = Registry(
    "pipeline", expected="a function of model, optimizer, device and forward", accepts=callable
)


def make_pipeline(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
    *,
    loss: Callable[[Any, Batch], Tensor] | None = None,
) -> Pipeline[Batch]:
    """Make a pipeline that trains a model, and evaluates it while it is in evaluation mode; see `run_pipeline`.

    Args:
        name: `none`, `sparse-dist`, `prefetch` (on CUDA only), or one of your own in `PIPELINES`.
        model: on `device`. For `sparse-dist` and `prefetch`, a DistributedModelParallel whose forward torch.fx can
            trace: it passes fields of the batch to sharded modules, and leaves the rest to other modules.
        loss: from the model's output and the batch to a scalar, such as `lambda output, batch: scale_loss(output[0],
            batch).sum()`; None: the model returns (loss, output).

    Raises:
        ConfigError: there is no pipeline of that name, or it cannot work with this device or model.
    """
    return PIPELINES[name](model, optimizer, torch.device(device), PipelineForward(model, loss))


def run_pipeline(pipeline: Pipeline[Batch], batches: Iterable[Batch]) -> Iterator[PipelineStep[Batch]]:
    """Yield the step of each batch, until the data end and the pipeline is empty.

    In training mode each step is an optimizer step. To evaluate, call `model.eval()` and iterate under
    `torch.no_grad()`. Afterwards the model is restored: it may be called directly, or run on other batches in another
    mode. Closing the iterator drops the batches that were pulled ahead; to pause after n steps, run `islice(iterator,
    n)`. After an error in a step, create a new model and pipeline.

    Collective where the model is: every rank must run equally many batches, as balanced ones are.
    """
    iterator = iter(batches)
    while True:
        try:
            step = pipeline.progress(iterator)
        except StopIteration:
            break
        try:
            yield step
        except GeneratorExit:
            break
    pipeline.reset()
    if isinstance(pipeline, _RewritesModel):
        _restore_nested_modules(pipeline.detach(), pipeline)
        pipeline.attach()


def _restore_nested_modules(model: nn.Module, pipeline: object) -> None:
    # TorchRec 1.6 adds nested modules that ran a batch ahead to the top, with a dot in their names, so that a direct
    # call would get the ids of an earlier batch.
    top = model.module if isinstance(model, DistributedModelParallel) else model
    for replaced in getattr(pipeline, "_pipelined_postprocs", ()):
        parent, dot, name = replaced.fqn.rpartition(".")
        setattr(top.get_submodule(parent), name, replaced.postproc_module)
        if dot:
            top._modules.pop(replaced.fqn, None)


@runtime_checkable
class _RewritesModel(Protocol):
    """A pipeline of TorchRec that replaces the forward of sharded modules, which then cannot be called directly."""

    def detach(self) -> nn.Module: ...  # restores it

    def attach(self) -> None: ...  # lets the next `progress` replace it again


def _torchrec_pipeline(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, forward: PipelineForward[Any]
) -> Pipeline[Any]:
    if name == "none":
        # It uses only `training` and the call of the model, and takes no `custom_model_fwd`.
        return cast(Pipeline[Any], TrainPipelineBase(cast(nn.Module, forward), optimizer, device))
    if name == "prefetch" and device.type != "cuda":
        raise ConfigError(f"the pipeline 'prefetch' needs a CUDA device, got {device}; use 'sparse-dist' or 'none'")
    if not any(isinstance(module, ShardedModule) for module in model.modules()):
        raise ConfigError(f"the model has no sharded modules for the pipeline {name!r} to work ahead on; use 'none'")
    make = PrefetchTrainPipelineSparseDist if name == "prefetch" else TrainPipelineSparseDist
    return cast(Pipeline[Any], make(model, optimizer, device, custom_model_fwd=forward, pipeline_postproc=True))


for _name in ("none", "sparse-dist", "prefetch"):
    PIPELINES.register(_name)(partial(_torchrec_pipeline, _name))
