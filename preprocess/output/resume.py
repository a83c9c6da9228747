"""Whether a run goes on with what a killed one has left, or starts over."""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import evenrank
from evenrank.core.files import write_text
from evenrank.datasets.schema import IdKind
from evenrank.preprocess.config import PreprocessConfig
from evenrank.preprocess.output.replace import DATASET_NAME

WORK_NAME = "work"  # folder of what is needed until the dataset is complete, and of results by stage
_PLAN_NAME = "plan.json"
# Changes when the machine starts, and perhaps loses what was not on the disk yet; only Linux has it.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOGGER = logging.getLogger("evenrank.preprocess")


def plan_of(config: PreprocessConfig, files: Iterable[Path]) -> dict[str, Any]:
    """Return everything that a dataset depends on; files count by their sizes and times of change."""
    # Whichever engine it is, which needs absolute paths or not.
    same = replace(
        config,
        out="",
        overwrite=False,
        raw_dir=Path("raw"),
        engine="local",
        ray_address=None,
        memory_limit=None,
    )
    if config.custom is not None:
        events = tuple(path.absolute() for path in config.custom.events)
        same = replace(same, custom=replace(config.custom, events=events))
    stats = {str(file.absolute()): file.stat() for file in files if file.is_file()}
    return {
        "evenrank": evenrank.__version__,
        "options": repr(same),
        "raw_dir": str(config.raw_dir.absolute()),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "start of the machine": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
    }


def begin(folder: Path, plan: Mapping[str, Any], kinds: Mapping[str, IdKind]) -> dict[str, IdKind]:
    """Prepare the folder of a run: keep what is there if it is of the same plan, else start over.

    `kinds` are the types of ids that are known. Return those that are known now: the killed run may have found more.
    """
    path, found, known = folder / _PLAN_NAME, dict[str, Any](), dict[str, IdKind]()
    if path.is_file():
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):  # it is damaged
            content = dict(json.loads(path.read_text(encoding="utf-8")))
            known, found = dict(content.pop("kinds")), content
        changed = [name for name in plan if plan[name] != found.get(name)]
        if not changed and kinds.items() <= known.items() and (folder / DATASET_NAME).is_dir():
            _LOGGER.warning("going on with what an earlier run has finished")
            return known
        if changed:
            _LOGGER.warning("starting over: not as in the run that did not finish: %s", ", ".join(changed))
    path.unlink(missing_ok=True)
    for name in (DATASET_NAME, WORK_NAME):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    write_text(path, json.dumps({**plan, "kinds": dict(kinds)}))
    return dict(kinds)
