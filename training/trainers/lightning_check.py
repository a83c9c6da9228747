"""`checks`: the callback that evenrank's entry point gives each Trainer of Lightning, so that none resumes wrongly."""

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from evenrank.core.errors import ConfigError


def checks() -> list[Callback]:
    """Return the callback; none in programs that import no loader of evenrank."""
    return [ResumeCheck()] if "evenrank.dataloader" in sys.modules else []


class ResumeCheck(Callback):
    """Raises an error where a job resumes that would lose samples, or train them again, without `ElasticResume`."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the number of batches that Lightning has counted in this epoch with the loader's position."""
        fit_loop: Any = trainer.fit_loop
        loaders = [] if fit_loop._combined_loader is None else fit_loop._combined_loader.flattened
        if len(loaders) != 1 or not hasattr(loader := loaders[0], "remaining_batches") or _has_callback(trainer):
            return
        if fit_loop._combined_loader_states_to_load:
            raise _error("does not load the loader's state that was saved at the end of an epoch")
        try:
            done = len(loader) - loader.remaining_batches()
        except TypeError:  # of unknown length, so that Lightning trains all that there is
            return
        epoch_loop, limit = fit_loop.epoch_loop, fit_loop.max_batches
        counted = epoch_loop.batch_progress.current.processed
        if epoch_loop.restarted_on_train_batch_end and counted >= limit:
            counted = 0  # as Lightning does at the end of an epoch
        if fit_loop.restarting and counted != (done := done if done < limit else 0):
            raise _error(f"goes on after batch {counted} of {limit}, and the loader after batch {done}")


def _error(text: str) -> ConfigError:
    return ConfigError(
        f"this job would lose samples, or train some again, because Lightning {text}; pass the Trainer "
        "callbacks=[ElasticResume()], of evenrank.training.trainers.lightning_callback"
    )


def _has_callback(trainer: Any) -> bool:
    from evenrank.training.trainers.lightning_callback import ElasticResume  # which imports torchrec

    return any(isinstance(callback, ElasticResume) for callback in trainer.callbacks)
