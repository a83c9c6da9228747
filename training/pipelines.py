"""TorchRec's training pipelines by name, and those that users register.

    none          TrainPipelineBase: copies the next batch to the device while this one trains
    sparse-dist   TrainPipelineSparseDist: also sends the ids of sharded tables to the ranks that hold their rows
    prefetch      PrefetchTrainPipelineSparseDist: also fills the device's caches of tables that are in host memory

They are TorchRec's own classes. Here each is given the same forward, with the loss inside the model or outside, and
`run_pipeline` drives it until the data end.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from evenrank.core.errors import ConfigError
from evenrank.core.registry import Registry

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStep(Generic[Batch]):
    """What a pipeline returns for each batch."""

    batch: Batch
    """The batch that was trained or evaluated, on the device."""
    loss: Tensor
    """What the optimizer step minimized: a scalar, detached."""
    output: Any
    """What the model returned: with the loss outside, all of it; with the loss inside, what came with the loss."""


class PipelineForward(Generic[Batch]):
    """A model and its loss as one function of a batch, in the form in which TorchRec's pipelines call models.

    Args:
        model: called with a batch.
        loss: from what the model returned, and the batch, to a scalar; None: the model returns (loss, output).

    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Batch], Tensor] | None) -> None:
        self._model = model
        self._loss = loss

    @property
    def training(self) -> bool:
        """Whether the model is in training mode; if not, pipelines neither call `backward` nor step the optimizer."""
        return self._model.training

    def __call__(self, batch: Batch) -> tuple[Tensor, PipelineStep[Batch]]:
        """Return the loss, and the step that the pipeline is to return."""
        output = self._model(batch)
        if self._loss is None:
            if not isinstance(output, tuple | list) or len(output) != 2:
                raise ConfigError(
                    f"the model returned {type(output).__name__} instead of (loss, output); pass loss= to make_pipeline"
                )
            loss, output = output
        else:
            loss = self._loss(output, batch)
        return loss, PipelineStep(batch=batch, loss=loss.detach(), output=output)


class Pipeline(Protocol[Batch]):
    """What a pipeline must have; TorchRec's have it."""

    def progress(self, dataloader_iter: Iterator[Batch]) -> PipelineStep[Batch]:
        """Train the next batch, or evaluate it if the model is in evaluation mode.

        Batches may be pulled from the iterator ahead. Once it has ended, those pulled come first.

        Raises:
            StopIteration: there is none left.

        """

    def reset(self) -> None:
        """Drop the batches that were pulled ahead; the next `progress` may be given another iterator."""


PipelineFactory = Callable[[nn.Module, torch.optim.Optimizer, torch.device, PipelineForward[Any]], Pipeline[Any]]
"""Makes a pipeline from the model, the optimizer, the device that batches are copied to, and the forward that the
pipeline calls with each batch. The model is there to be looked at and rewritten, as TorchRec does."""

PIPELINES: Registry[PipelineFactory] = Registry(
    "pipeline", expected="a function of model, optimizer, device and forward", accepts=callable
)


def register_pipeline(name: str) -> Callable[[PipelineFactory], PipelineFactory]:
    """Return a decorator that makes a function available to `make_pipeline` under a name.

    Raises:
        ConfigError: the name is taken, or what is decorated cannot be called.

    """
    return PIPELINES.register(name)


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
        name: `none`, `sparse-dist`, `prefetch` (on CUDA only), or one of your own (`register_pipeline`).
        model: called with each batch. For the last two, a DistributedModelParallel whose forward torch.fx can trace: it
            passes fields of the batch to sharded modules, and leaves the rest to other modules.
        optimizer: of the model; steps after each batch.
        device: where the model is.
        loss: from what the model returns, and the batch, to a scalar, as `lambda output, batch: scale_loss(output[0],
            batch).sum()`; None: the model returns (loss, output).

    Raises:
        ConfigError: there is no pipeline of that name, or it cannot work with this device or model.

    """
    return PIPELINES[name](model, optimizer, torch.device(device), PipelineForward(model, loss))


def run_pipeline(pipeline: Pipeline[Batch], batches: Iterable[Batch]) -> Iterator[PipelineStep[Batch]]:
    """Yield the step of each batch, also of those that the pipeline still holds when the data end.

    In training mode each step is an optimizer step. To evaluate, call `model.eval()` and iterate under
    `torch.no_grad()`. Afterwards the pipeline is empty and the model as it was, so the next run may have other batches
    and another mode, and the model may be called directly. A run that is abandoned drops the batches that were pulled
    ahead; to pause after n steps, run `islice(iterator, n)`. After an error in a step, create a new model and pipeline.

    Collective where the model is: every rank must run equally many batches, as a Balancer yields.
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
    """Put back the modules that ran a batch ahead: TorchRec 1.6 puts back only those at the top of the model.

    It adds the others to the top, with a dot in their names, so that a direct call gets the ids of an earlier batch.
    """
    from torchrec.distributed import DistributedModelParallel

    top = model.module if isinstance(model, DistributedModelParallel) else model
    for replaced in getattr(pipeline, "_pipelined_postprocs", ()):
        parent, dot, name = replaced.fqn.rpartition(".")
        setattr(top.get_submodule(parent), name, replaced.postproc_module)
        if dot:
            top._modules.pop(replaced.fqn, None)


@runtime_checkable
class _RewritesModel(Protocol):
    """TorchRec's pipelines that replace the forward of sharded modules, which then cannot be called directly."""

    def detach(self) -> nn.Module:
        """Give the modules their own forward again."""

    def attach(self) -> None:
        """Let the next `progress` replace it again."""


@register_pipeline("none")
def _base(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, forward: PipelineForward[Any]
) -> Pipeline[Any]:
    from torchrec.distributed.train_pipeline import TrainPipelineBase

    # Of the model it uses `training` and the call; it takes no function for the latter, as the others do.
    return cast(Pipeline[Any], TrainPipelineBase(cast(nn.Module, forward), optimizer, device))


@register_pipeline("sparse-dist")
def _sparse_dist(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, forward: PipelineForward[Any]
) -> Pipeline[Any]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    _check_sharded(model, "sparse-dist")
    pipeline = TrainPipelineSparseDist(model, optimizer, device, custom_model_fwd=forward, pipeline_postproc=True)
    return cast(Pipeline[Any], pipeline)


@register_pipeline("prefetch")
def _prefetch(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, forward: PipelineForward[Any]
) -> Pipeline[Any]:
    from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist

    if device.type != "cuda":
        raise ConfigError(f"the pipeline 'prefetch' needs a CUDA device, got {device}; use 'sparse-dist' or 'none'")
    _check_sharded(model, "prefetch")
    pipeline = PrefetchTrainPipelineSparseDist(
        model, optimizer, device, custom_model_fwd=forward, pipeline_postproc=True
    )
    return cast(Pipeline[Any], pipeline)


def _check_sharded(model: nn.Module, name: str) -> None:
    from torchrec.distributed.types import ShardedModule

    if not any(isinstance(module, ShardedModule) for module in model.modules()):
        raise ConfigError(f"the model has no sharded modules for the pipeline {name!r} to work ahead on; use 'none'")
