"""`ElasticResume`: a callback with which Lightning trains all of each epoch, and resumes on other numbers of ranks."""

from typing import Any

from evenrank.core.errors import ConfigError
from evenrank.core.optional_imports import naming_extras
from evenrank.dataloader.batches.batch import JaggedBatch
from evenrank.dataloader.state.resume_point import Position

with naming_extras():
    from lightning.pytorch import Callback, LightningModule, Trainer


class ElasticResume(Callback):
    """Trains each sample of an epoch once, also after resuming, on any number of ranks: `Trainer(callbacks=[...])`.

    Lightning counts the batches of an epoch itself, takes all epochs to be as long as the first, does not load a state
    that the loader had at an epoch's end, and saves the one after the batch fetched last. The callback corrects all
    four.

    Raises:
        ConfigError: in `fit`, there are several training loaders.
    """

    _trained: Any = None  # the position after the batch trained last

    def state_dict(self) -> dict[str, Any]:
        """Return a mark, so that Lightning warns if the job resumes without this callback."""
        return {"version": 1}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue at the loader's state, and set Lightning's count of batches from it."""
        fit_loop: Any = trainer.fit_loop
        self._trained = None
        states, fit_loop._combined_loader_states_to_load = fit_loop._combined_loader_states_to_load, []
        for state in states:
            _loader_of(trainer).load_state_dict(state)
        num_batches = _set_length(trainer)
        if states or num_batches is not None:
            iter(fit_loop._data_fetcher)  # over the batches from there
        if num_batches is not None and fit_loop.restarting:
            progress = fit_loop.epoch_loop.batch_progress.current
            done = num_batches - _loader_of(trainer).remaining_batches()
            progress.ready = progress.started = progress.processed = done
            progress.completed = done - fit_loop.epoch_loop.restarted_on_train_batch_end  # which adds one

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the number of batches of this epoch."""
        _set_length(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *results: Any) -> None:
        """Keep the position after the batch."""
        if isinstance(batch := results[1], JaggedBatch):
            self._trained = Position(batch.epoch, batch.position)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the loader's state at that position."""
        if self._trained is not None:
            states = [_loader_of(trainer).state_dict(after=self._trained)]
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states


def _loader_of(trainer: Trainer) -> Any:
    combined: Any = trainer.fit_loop._combined_loader
    if len(combined.flattened) > 1:
        raise ConfigError("ElasticResume resumes one training loader; return one in train_dataloader, or leave it out")
    return combined.flattened[0]


def _set_length(trainer: Trainer) -> int | None:
    """Tell Lightning the number of batches of the next epoch, and return it; None if it is unknown."""
    fit_loop: Any = trainer.fit_loop
    loader, limit = _loader_of(trainer), trainer.limit_train_batches
    if hasattr(loader, "skip_empty"):
        loader.skip_empty()  # at a window of time without events, Lightning would stop
    try:
        num_batches = len(loader)
    except TypeError:
        return None
    limited = min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
    fit_loop.max_batches = fit_loop._combined_loader.limits = limited
    return num_batches
