"""`BalancedTrainer`: the Trainer of Transformers on balanced batches, which resumes within an epoch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from evenrank.core.errors import ConfigError, StateError
from evenrank.core.optional_imports import naming_extras
from evenrank.dataloader.elastic_sampler import ElasticLoader
from evenrank.dataloader.state.node import EpochNode, find_rank_invariants
from evenrank.training.loss import LossAverage, accumulate

with naming_extras():
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
if not hasattr(Trainer, "loss_is_scaled_for_ga"):  # older ones would divide the loss again
    raise ConfigError("BalancedTrainer needs transformers 5.19 or newer; run pip install 'transformers>=5.19'")


class _Inputs(IterableDataset[dict[str, Any]]):
    """The inputs of the model, epoch after epoch; its length is the number of batches of each.

    To resume, the Trainer drops the inputs of the epoch so far. Here these are empty, and the loader continues at its
    state: nothing is read twice, and the Trainer's counts of steps and epochs stay right.
    """

    def __init__(self, loader: Any, args: TrainingArguments) -> None:
        self.loader, self._args, self._num_batches = loader, args, len(loader)
        self.num_trained = 0  # inputs of the next iteration that the Trainer drops

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if len(self.loader) != self._num_batches:
            raise ConfigError(
                f"the Trainer takes all epochs to have {self._num_batches} batches, the next has {len(self.loader)}; "
                "leave BalanceConfig.pack and TimeWindows out"
            )
        num_pulled, self.num_trained = self.num_trained, 0
        yield from [{}] * num_pulled
        for batches in (steps := accumulate(self.loader, self._args.gradient_accumulation_steps)):
            num_pulled += len(batches)
            if num_pulled == self._num_batches:
                next(steps, None)  # ends the epoch, where ranks compare their plans; the Trainer pulls no further
            for batch in batches:
                yield {"batch": batch.to(self._args.device, non_blocking=True)}


class _EvalInputs(IterableDataset[dict[str, Any]]):
    """The inputs of the model in the epoch that is the loader's next one, each time."""

    def __init__(self, loader: Any, args: TrainingArguments) -> None:
        self._loader, self._args = loader, args
        self.average, self.num_samples = LossAverage(device=args.device), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begin = None
        with contextlib.suppress(ConfigError):  # a loader without a state, behind a Balancer, goes on
            begin = self._loader.state_dict()
        for batch in self._loader:
            if batch.world_loss_tokens is None:  # a rank's own share will do, because sums are averaged
                batch = batch.replace(world_loss_tokens=batch.loss_tokens, dp_size=1)
            self.num_samples += batch.num_real
            yield {"batch": batch.to(self._args.device, non_blocking=True)}
        if begin is not None:
            self._loader.load_state_dict(begin)


class LoaderPosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves the loader's state with the Trainer's and loads it from there; each BalancedTrainer has one."""

    _inputs: _Inputs | None = None

    def state(self) -> dict[str, Any]:
        """Return the loader's state after the batch trained last, in the form of Transformers."""
        position = None if self._inputs is None else self._inputs.loader.state_dict()
        return {"args": {}, "attributes": {"position": position}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **objects: Any) -> None:
        """Continue at the loader's state where the Trainer has resumed."""
        self._inputs = inputs = objects["train_dataloader"].dataset
        if not state.global_step:
            return
        if args.ignore_data_skip:
            raise ConfigError("ignore_data_skip makes the Trainer lose count of steps; leave it out, no batch is read")
        callbacks: Any = state.stateful_callbacks  # a dict, whatever its annotation says
        if (saved := callbacks.get(type(self).__name__)) is None:
            raise StateError("the checkpoint has no state of a loader; load one of a BalancedTrainer")
        inputs.loader.load_state_dict(saved["attributes"]["position"])
        per_step, done = args.gradient_accumulation_steps, len(inputs) - inputs.loader.remaining_batches()
        epoch, steps = divmod(state.global_step, -(-len(inputs) // per_step))
        inputs.num_trained = steps * per_step
        # The Trainer saves its epoch, and counts it from its steps when it resumes.
        if (saved_epoch := int(state.epoch or 0), done) != (epoch, inputs.num_trained):
            raise StateError(
                f"the checkpoint is after {done} batches of epoch {saved_epoch}, {state.global_step} steps here after "
                f"{inputs.num_trained} of epoch {epoch}; resume with the same ranks * batch_size and "
                "gradient_accumulation_steps"
            )


class BalancedTrainer(Trainer):  # type: ignore[misc]
    """The Trainer with a balanced loader as `train_dataset`: of `build_loader(balance=...)`, or a Balancer.

    The model gets the batch, on its device, as the argument `batch`, and returns {"loss": scale_loss(loss_sum, batch)};
    or override `compute_loss`, whose inputs are {"batch": batch}. The gradient and the logged loss of a step are means
    over the loss tokens of all ranks, also with `gradient_accumulation_steps`. Training resumes at every checkpoint, on
    any number of ranks with the same global batch size, if the loader's state is that of all ranks, as evenrank's is.

    `eval_dataset` is a loader too, or a dict of loaders, also of streams or without balance. Each evaluation takes the
    next epoch of its loader, and its loss is the mean over the loss tokens of all ranks.

    Raises:
        TypeError: in `train`, the loader has no length, such as one of streams.
        ConfigError: in `train`, batches are not balanced, epochs differ in length (`BalanceConfig.pack`, TimeWindows),
            `per_device_train_batch_size` is not the loader's, or `eval_dataset` is a DataLoader, or a loader next to
            `compute_metrics`.
        StateError: in `train`, the checkpoint has no state of this loader, or one of another global batch size.
    """

    loss_is_scaled_for_ga = True  # by `accumulate`
    _evaluated: _EvalInputs | None = None  # by this evaluation

    def get_train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Return the inputs, which neither the Trainer nor Accelerate may divide among ranks again."""
        batch_size = find_rank_invariants(self.train_dataset).get("batch_size", self._train_batch_size)
        if batch_size != self._train_batch_size:
            found = f"per_device_train_batch_size is {self._train_batch_size}, the loader's batch_size {batch_size}"
            raise ConfigError(f"{found}; pass per_device_train_batch_size={batch_size}")
        for dataset in self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]:
            self._is_loader(dataset)
        self.remove_callback(LoaderPosition)  # of an earlier `train`
        self.add_callback(LoaderPosition)
        return DataLoader(_Inputs(self.train_dataset, self.args), batch_size=None)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[dict[str, Any]]:
        """Return the inputs of evaluation; neither the Trainer nor Accelerate may divide a loader among ranks again."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        given = self.eval_dataset[given] if isinstance(given, str) else given
        if self._is_loader(given):
            return DataLoader(_EvalInputs(given, self.args), batch_size=None)
        dataloader: DataLoader[dict[str, Any]] = super().get_eval_dataloader(eval_dataset)
        return dataloader

    def _is_loader(self, dataset: Any) -> bool:
        """Return whether a dataset is a loader; a ConfigError if it is one that cannot be evaluated."""
        if isinstance(dataset, DataLoader):
            raise ConfigError("eval_dataset is a DataLoader; pass a Balancer over it, or its dataset and data_collator")
        is_loader = isinstance(dataset, ElasticLoader | EpochNode)
        if is_loader and dataset is self.train_dataset:
            raise ConfigError("eval_dataset is the train_dataset, which has one position; pass another loader")
        if is_loader and self.compute_metrics is not None:
            raise ConfigError(
                "compute_metrics gets predictions in rows, which batches of a loader do not have; leave it out, and "
                "update metrics of evenrank.training in compute_loss"
            )
        return is_loader

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Evaluate; the loss over a loader is the mean over the loss tokens of all ranks."""
        inputs = dataloader.dataset
        self._evaluated = inputs if isinstance(inputs, _EvalInputs) else None
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **options)
        if self._evaluated is None:
            return output
        num_samples: Any = self.accelerator.reduce(torch.tensor(inputs.num_samples, device=self.args.device), "sum")
        metrics = {**output.metrics, f"{metric_key_prefix}_loss": inputs.average.compute()[0]}
        return output._replace(metrics=metrics, num_samples=int(num_samples))

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Add the loss of a batch of a loader, or predict as the Trainer does."""
        if self._evaluated is None:
            return super().prediction_step(model, inputs, *args, **options)
        batch = inputs["batch"]
        with torch.no_grad(), self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs)
        self._evaluated.average.update(loss.detach() * (batch.world_loss_tokens / batch.dp_size), batch)
        return None, None, None  # nothing that the Trainer would gather

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the samples of an epoch, over all ranks and if all batches are full, for the Trainer's log."""
        return len(dataloader) * int(self.args.train_batch_size * self.args.world_size)
