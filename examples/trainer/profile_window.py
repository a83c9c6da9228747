"""`ProfileWindow`: a Chrome trace of some steps of a run and, on GPUs, a memory snapshot."""

import contextlib
import pickle
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from evenrank.core.errors import DataError

_MAX_EVENTS = 100_000  # of the allocator, the last ones


class ProfileWindow:
    """Profiles the steps start..stop-1 of a run, counted from 0, on this rank.

    Of the job's steps 101 to 110, numbered from 1, `steps-101-110.trace.json` is for Perfetto or chrome://tracing, and
    `steps-101-110.memory.pickle` for https://pytorch.org/memory_viz. A run that ends early leaves those of fewer steps.

    Args:
        folder: of the files; created if missing.
        window: (start, stop).
        device: that trains.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, folder: Path, window: tuple[int, int], device: torch.device) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._start, self._stop = window
        self._on_gpu = device.type == "cuda"
        self._num_steps = 0  # done
        self._last_step = 0  # its number in the job
        self._profile: profile | None = None

    def begin_step(self) -> None:
        """Begin a step; `end_step` must follow."""
        if self._profile is not None:
            self._profile.step()
        elif self._num_steps == self._start:
            activities = [ProfilerActivity.CPU]
            if self._on_gpu:
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)
            # With a schedule, the trace has a span for each step.
            self._profile = profile(activities=activities, schedule=lambda _: ProfilerAction.RECORD)
            self._profile.start()

    def end_step(self, step: int) -> Path | None:
        """End a step, whose number in the job is `step`; return the trace after the window's last step.

        Raises:
            DataError: a file cannot be written.
        """
        self._num_steps += 1
        self._last_step = step
        return self.finish() if self._num_steps == self._stop else None

    def finish(self) -> Path | None:
        """End the window, if it has begun and not ended; return the trace of its steps that were done.

        Raises:
            DataError: a file cannot be written.
        """
        if self._profile is None:
            return None
        snapshot = None
        if self._on_gpu:
            torch.cuda.synchronize()  # so that the trace has the kernels of the last step
            snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile.stop()
        finished, self._profile = self._profile, None
        done = self._num_steps - self._start
        stem = self._folder / f"steps-{self._last_step - done + 1}-{self._last_step}"
        trace = stem.with_suffix(".trace.json")
        partial = stem.with_suffix(".partial")
        try:
            if snapshot is not None:
                partial.write_bytes(pickle.dumps(snapshot))
                partial.replace(stem.with_suffix(".memory.pickle"))
            finished.export_chrome_trace(str(partial))
            partial.replace(trace)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise DataError(
                f"{trace} could not be written: {error.strerror}; free some space, or train without --profile"
            ) from error
        return trace

    @property
    def has_begun(self) -> bool:
        """Whether a step of the window was done."""
        return self._num_steps > self._start
