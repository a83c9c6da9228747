"""Checkpoints of a job: written in the background by torch.distributed.checkpoint, complete or not there at all.

    OUT/checkpoints/step-00000200/                 complete: what torch.distributed.checkpoint wrote, `settings.json`,
                                                   and `checksums.json` of all other files
    OUT/checkpoints/step-00000300.TOKEN.partial/   being written, or left by a job that was killed; never read

Rank 0 renames a folder when all ranks have written their parts, then deletes the oldest ones. Nothing is loaded before
all checksums have been found right.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from evenrank.core.errors import DataError, StateError, one_line
from evenrank.core.files import open_regular, write_text
from evenrank.dataloader.routing import DIST_TYPE, KeyMap, check_dist_type, dist_type
from trainer.world import on_all_ranks, on_first_rank

_NAME = re.compile(r"step-\d{8,}")
PARTIAL = ".partial"
_SETTINGS = "settings.json"
_CHECKSUMS = "checksums.json"


class Checkpoints:
    """The newest checkpoints of a job, in a folder that all ranks can read and write. Collective, as are its methods.

    Args:
        folder: created if missing.
        keep: number of checkpoints to keep, at least 1.
        settings: what a job must keep to continue from a checkpoint, saved with each; values that JSON can hold.
        key_maps: which row of its table has which key, by feature; saved and kept too.
    """

    def __init__(
        self, folder: Path, *, keep: int, settings: Mapping[str, Any], key_maps: Mapping[str, KeyMap] | None = None
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._settings = dict(settings)
        self._key_maps = dict(key_maps or {})
        self._group = dist.new_group(backend="gloo")  # in the background, nothing else may use it
        self._pending: tuple[Path, Future[None]] | None = None
        self._last_step: int | None = None  # of the checkpoint that was loaded or started last
        # A rank may outlive a job whose rank 0 was killed: what it still writes must not get into a folder of this run.
        token = [secrets.token_hex(4)]
        dist.broadcast_object_list(token, src=0, group=self._group)
        self._partial_suffix = f".{token[0]}{PARTIAL}"
        on_first_rank(lambda: clean(folder))

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, the one that rank 0 sees; None if there is none."""
        found = [complete_checkpoints(self._folder)[-1:]]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0][0] if found[0] else None

    def load(self, path: Path, state: dict[str, Any]) -> None:
        """Replace what is in `state`, of the structure that was saved, by what the checkpoint has; on any world size.

        The entry `step` must be that of the checkpoint's name.

        Raises:
            StateError: the checkpoint is of another job, or damaged.
        """
        on_all_ranks(lambda: check_files(path, dist.get_rank(), dist.get_world_size()))
        on_all_ranks(lambda: self._check_settings(path))
        try:
            with warnings.catch_warnings(action="ignore"):  # of torch.distributed.checkpoint about its own internals
                # Without this planner, a rank that has no part of a sharded table expects a checkpoint of PyTorch 2.3.
                planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
                load(state, checkpoint_id=path, planner=planner, process_group=self._group)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise StateError(
                f"{path} is as it was saved, but cannot be loaded ({one_line(error)}); choose another --out, or the "
                "versions of evenrank and PyTorch that saved it"
            ) from error
        if state["step"] != step_of(path):
            raise StateError(f"{path} has the state of step {state['step']}; rename it to {_name(state['step'])}")
        self._last_step = step_of(path)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state and start writing it, unless that step has been saved already.

        Waits first if the last checkpoint is still being written.

        Raises:
            DataError: the last checkpoint could not be written, on any rank.
        """
        if step == self._last_step:
            return
        self.finish()
        path = self._folder / _name(step)
        with warnings.catch_warnings(action="ignore"):
            # The writer copies the state itself: the default stager does not know ShardedTensors.
            writer = _ChecksumWriter(self._partial(path))
            saving = async_save(state, storage_writer=writer, process_group=self._group)
        assert isinstance(saving, Future)
        written: Future[None] = Future()
        saving.add_done_callback(lambda saved: self._complete(path, saved, writer.checksums, written))
        self._pending, self._last_step = (path, written), step

    def finish(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            DataError: it could not be written, on any rank.
        """
        if self._pending is None:
            return
        (path, written), self._pending = self._pending, None

        def check() -> None:
            if (error := written.exception()) is not None:
                raise DataError(
                    f"{path} could not be written: {one_line(error)}; check the space and the permissions of its folder"
                ) from error

        on_all_ranks(check)  # only rank 0 completes it

    def _partial(self, path: Path) -> Path:
        return path.with_suffix(self._partial_suffix)

    def _complete(self, path: Path, saved: Future[Any], checksums: Mapping[str, str], written: Future[None]) -> None:
        """Make a checkpoint visible once all ranks have written it, and delete the oldest; in the background."""
        try:
            saved.result()
            if dist.get_rank() == 0:
                partial = self._partial(path)
                write_settings(partial, self._settings, self._key_maps)
                write_checksums(partial, checksums)
                partial.rename(path)
                for old in complete_checkpoints(self._folder)[: -self._keep]:
                    # Renamed first, so that no half of a checkpoint has its name if the job is killed here.
                    shutil.rmtree(old.rename(old.with_suffix(PARTIAL)))
            written.set_result(None)
        except (Exception, CheckpointException) as error:
            written.set_exception(error)

    def _check_settings(self, path: Path) -> None:
        """Raise a StateError unless this job has the settings of a checkpoint."""
        saved = read_settings(path)
        for name, value in self._settings.items():
            if saved.get(name) != value:
                raise StateError(
                    f"{path} was saved with {name} = {saved.get(name)!r}, this job has {value!r}; "
                    "choose another --out, or the settings of that job"
                )
        try:
            check_dist_type(saved.get(DIST_TYPE), self._key_maps, source=str(path), notify=dist.get_rank() == 0)
        except StateError as error:
            raise StateError(f"{error}; for a job of this trainer: scripts/remap.py") from error


class _ChecksumWriter(FileSystemWriter):
    """Also computes the checksum of each file, on the rank that writes it.

    Attributes:
        checksums: on rank 0, once all ranks have written: of their files, by name.
    """

    checksums: Mapping[str, str] = MappingProxyType({})

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write the files of this rank; what this returns is sent to rank 0."""
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        checksums = {name: _checksum(Path(self.path) / name) for name in names}
        checked: TorchFuture[list[WriteResult]] = TorchFuture()
        checked.set_result(
            [dataclasses.replace(result, storage_data=(result.storage_data, checksums)) for result in results]
        )
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata; on rank 0."""
        of_all_ranks = [result for of_rank in results for result in of_rank]
        self.checksums = {name: digest for result in of_all_ranks for name, digest in result.storage_data[1].items()}
        plain = [dataclasses.replace(result, storage_data=result.storage_data[0]) for result in of_all_ranks]
        super().finish(metadata, [plain])


def _checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Replace an error in reading the files of a checkpoint by a `StateError` that names it."""
    try:
        yield
    except (DataError, OSError) as error:
        raise StateError(
            f"{path} is damaged ({one_line(error)}); restore it, or delete it to resume from the one before"
        ) from error


def clean(folder: Path) -> None:
    """Create the folder of the checkpoints of a job, or remove what a job that was killed has left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(left_over)


def check_files(path: Path, rank: int = 0, ranks: int = 1) -> None:
    """Check that a checkpoint has the files that were saved; each rank reads its share of them.

    Raises:
        StateError: one of them is missing or damaged.
    """
    with _naming(path):
        checksums = _read_json(path / _CHECKSUMS)
        for name in sorted({_SETTINGS, *checksums})[rank::ranks]:
            if _checksum(path / name) != checksums.get(name):
                raise DataError(f"{name} is not as it was saved")


def write_checksums(path: Path, known: Mapping[str, str]) -> None:
    """Write the checksums of all files of a checkpoint, of which some are known; by name."""
    others = [file for file in path.iterdir() if file.name not in known]
    write_text(path / _CHECKSUMS, json.dumps({**known, **{file.name: _checksum(file) for file in others}}, indent=2))


def read_settings(path: Path) -> dict[str, Any]:
    """Return what `write_settings` wrote.

    Raises:
        StateError: there is no such file, or it is damaged.
    """
    with _naming(path):
        return _read_json(path / _SETTINGS)


def write_settings(path: Path, settings: Mapping[str, Any], key_maps: Mapping[str, KeyMap]) -> None:
    """Write the settings of a job, and how its keys are mapped, to the folder of a checkpoint."""
    write_text(path / _SETTINGS, json.dumps({**settings, DIST_TYPE: dist_type(key_maps)}, indent=2))


def _read_json(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        text = file.read()
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:  # it may be any JSON, or none
        raise DataError(f"{path.name} cannot be read as JSON") from error


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a job, oldest first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def _name(step: int) -> str:
    return f"step-{step:08}"


def step_of(path: Path) -> int:
    """Return the step of a complete checkpoint."""
    return int(path.name.removeprefix("step-"))
