"""What a job says: lines or a progress bar for people, JSON lines for programs, and scalars for TensorBoard."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]

from evenrank.core.errors import ConfigError


class JobLog:
    """The log of a job; on all ranks but the first, it says nothing.

    Args:
        out: folder, which gets `log.jsonl` and, on request, `tensorboard/`.
        is_first: this is rank 0.
        tensorboard: also write scalars for TensorBoard.

    Raises:
        ConfigError: the package `tensorboard` is missing.
    """

    def __init__(self, out: Path, *, is_first: bool, tensorboard: bool) -> None:
        self._file: Any = None
        self._scalars: Any = None
        self._bar: tqdm | None = None
        if not is_first:
            return
        out.mkdir(parents=True, exist_ok=True)
        if tensorboard:
            self._scalars = _summary_writer(out / "tensorboard")
        self._file = _open_lines(out / "log.jsonl")

    def expect(self, step: int, last_step: int) -> None:
        """Show a progress bar from a step on, if standard error is a terminal, or change where it will end."""
        if self._file is None:
            return
        if self._bar is None:
            self._bar = tqdm(initial=step, unit="step", disable=None, leave=False)
        self._bar.total = last_step
        self._bar.refresh()

    def advance(self) -> None:
        """Note that a step is done."""
        if self._bar is not None:
            self._bar.update()

    def say(self, text: str) -> None:
        """Print a line for people, above the progress bar."""
        if self._file is not None:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def record(self, kind: str, step: int, values: Mapping[str, Any], *, of: str = "") -> None:
        """Write a line of JSON, and its numbers for TensorBoard: of a list, the least and the largest.

        Args:
            kind: such as `train` or `eval`, the first part of the scalars' names.
            step: optimizer steps so far.
            values: by name: numbers, lists of them with a place for each rank, and texts. None is left out.
            of: what the numbers are of, such as a layer, if there are several at a step; the next part of the names.
        """
        if self._file is not None:
            shown = {name: _of_json(value) for name, value in values.items() if value is not None}
            self._file.write(json.dumps({"kind": kind, "step": step, **shown}).encode() + b"\n")
        if self._scalars is not None:
            for name, value in _scalars(values):
                self._scalars.add_scalar("/".join(part for part in (kind, of, name) if part), value, step)

    def has(self, kind: str, step: int) -> bool:
        """Return whether `record` has written such a line, in this run or an earlier one. Collective."""
        found = [any(line["step"] == step for line in self.read(kind))]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of a kind, of this run and of earlier ones; none on all ranks but the first."""
        if self._file is None:
            return []
        self._file.seek(0)
        return [line for line in map(json.loads, self._file.read().splitlines()) if line["kind"] == kind]

    def close(self) -> None:
        """Remove the progress bar and close the files."""
        for part in (self._bar, self._file, self._scalars):
            if part is not None:
                part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _of_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_of_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value  # NaN is no JSON


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, list):
            yield f"{name}/min", min(value)
            yield f"{name}/max", max(value)
        elif isinstance(value, int | float):
            yield name, value


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency
    except ImportError as error:
        raise ConfigError(
            f"the package tensorboard is missing ({error}); pip install 'evenrank[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder))


def _open_lines(path: Path) -> Any:
    """Open a file to append lines to it, after removing an incomplete one of a job that was killed."""
    file = path.open("a+b", buffering=0)  # so that a job that is killed loses no line
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
    return file
