"""`ElasticResume`: a callback with which Lightning resumes within an epoch on other numbers of ranks."""

from typing import Any

from evenrank.core.optional_imports import naming_extras

with naming_extras():
    from lightning.pytorch import Callback, LightningModule, Trainer


class ElasticResume(Callback):
    """Resumes within an epoch on another number of ranks, or with other batch sizes: `Trainer(callbacks=[...])`.

    Lightning saves and loads the loader's state, but counts the batches of an epoch itself; this corrects the count.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set Lightning's count of batches from the position of the loader."""
        if trainer.fit_loop.restarting:
            loader: Any = trainer.train_dataloader
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            shift = len(loader) - loader.remaining_batches() - progress.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, getattr(progress, name) + shift)
