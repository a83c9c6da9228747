"""`preprocess`: raw files -> interactions -> buckets -> sequences -> splits -> a dataset, whole or not at all."""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import evenrank
from evenrank.core.errors import ConfigError, DataError
from evenrank.core.files import write_text
from evenrank.core.storage import Remote, is_url, locate
from evenrank.datasets.schema import ITEM_ID, MANIFEST_NAME, USER_ID, IdKind, Manifest
from evenrank.preprocess.append import continue_features, read_base
from evenrank.preprocess.build.buckets import Columns
from evenrank.preprocess.build.splits import IN_EVAL, parse_split, second_log
from evenrank.preprocess.build.vocabulary import EarlierIds, read_earlier
from evenrank.preprocess.config import PreprocessConfig, parse_ids, parse_min_count, parse_unknown
from evenrank.preprocess.engine import check_not_forked, own_memory
from evenrank.preprocess.job import Job
from evenrank.preprocess.log_config import AUTO, DENSE, KEEP, SyntheticConfig
from evenrank.preprocess.read.features import Interactions
from evenrank.preprocess.read.log import read_tabular
from evenrank.preprocess.read.places import Copies, copies_in
from evenrank.preprocess.read.public import CATALOG, CUSTOM, SYNTHETIC, ensure_raw_files
from evenrank.preprocess.read.synthetic import draw_interactions, expand_interactions, parse_expansion
from evenrank.preprocess.read.values import TextIdsError
from evenrank.preprocess.read.vectors import ids_files
from evenrank.preprocess.replace import DATASET_NAME, replace_dataset, wrap_write_errors

_PLAN_NAME, WORK_NAME = "plan.json", "work"
# Changes when the machine starts, and perhaps loses what was not on the disk yet; only Linux has it.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOGGER = logging.getLogger("evenrank.preprocess")


def preprocess(
    config: PreprocessConfig,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_added: Callable[[str], None] = lambda added: None,
    show_progress: bool = False,
) -> Manifest:
    """Write a dataset to a folder or URL and return its manifest.

    Args:
        config: the dataset, its options and its folder.
        on_stage: called with a short description of the progress.
        on_added: called with a description of what was appended to a dataset.
        show_progress: whether to show a progress bar of downloads on standard error.

    Raises:
        ConfigError, DataError: the message is one line with the cause and the remedy; `config.out` is unchanged.
    """
    check_not_forked()
    out, before, custom = locate(config.out), own_memory(), config.custom
    given = [] if custom is None else [*custom.events, custom.context, *custom.item_features]
    given += [] if custom is None else [path for path, _ in custom.vector_files.values()]
    paths = filter(None, (*given, parse_split(config.split).file))
    _check_out([path for path in paths if not is_url(path)], out)

    def write(folder: Path) -> tuple[Manifest, str]:
        with copies_in(folder / "inputs", on_stage) as copies:
            return _write(folder, _with_copies(config, copies), out, copies, before, show_progress=show_progress)

    manifest, added = replace_dataset(out, write, overwrite=config.overwrite, on_stage=on_stage)
    if added:
        on_added(added)
    return manifest


def _with_copies(config: PreprocessConfig, copies: Copies) -> PreprocessConfig:
    """Return the settings with paths of copies in place of URLs, and with paths that lead to logs from all nodes."""
    custom, listed = config.custom, parse_split(config.split).file
    shared = Path.absolute if config.engine == "ray" else Path
    if custom is not None:
        for path in chain(*(ids_files(vectors) for vectors, _ in custom.vector_files.values())):
            if isinstance(remote := locate(path), Remote) and remote.is_file():
                copies.path_of(path)
        custom = replace(
            custom,
            events=tuple(shared(copies.path_of(path)) for path in custom.events),
            context=custom.context and copies.path_of(custom.context),
            item_features=tuple(map(copies.path_of, custom.item_features)),
            item_vectors=custom.item_vectors and copies.path_of(custom.item_vectors),
            user_vectors=custom.user_vectors and copies.path_of(custom.user_vectors),
        )
    return replace(
        config,
        custom=custom,
        split=f"file:{copies.path_of(listed)}" if listed is not None and is_url(listed) else config.split,
        vocabulary=config.vocabulary and copies.dataset_of(config.vocabulary, needs_rows=False),
    )


def _write(
    folder: Path, config: PreprocessConfig, out: Path | Remote, copies: Copies, before: int, *, show_progress: bool
) -> tuple[Manifest, str]:
    """Write the dataset to the folder of a run, again if what begins like integers turns out to be texts.

    Return its manifest, and a description of what was appended to it.
    """
    public = CATALOG.get(config.dataset)
    default = AUTO if config.dataset == CUSTOM else public.ids if public else DENSE if config.expand else KEEP
    rules = {USER_ID: default, ITEM_ID: default} | parse_ids(config.ids)
    base, earlier_folder = None, config.vocabulary
    earlier: Mapping[str, EarlierIds] = {}
    if config.append:  # then there is no other vocabulary
        base = read_base(copies.dataset_of(config.out).absolute(), config, rules)
        earlier, earlier_folder = base.ids, base.folder
    elif config.vocabulary is not None:
        earlier = read_earlier(config.vocabulary, parse_unknown(config.unknown))
        rules |= {name: ids.summary.rule for name, ids in earlier.items()}
    rules |= _rules_of_counted(config, rules)
    copies.remove_others()
    known: dict[str, IdKind] = {name: ids.summary.kind for name, ids in earlier.items()}
    first_ms = {} if base is None else base.first_ms
    while True:
        copies.on_stage(f"opening {config.dataset}")
        source = open_source(config, rules=rules, known=known, first_ms=first_ms, show_progress=show_progress)
        for name in earlier:
            if (found_kind := source.id_kinds[name]) != known[name]:
                which = f"{found_kind} in {config.dataset} and {known[name]} in {config.vocabulary or out}"
                raise ConfigError(f"{name} is {which}; leave the vocabulary out, or give one of that dataset")
        if earlier_folder is not None:
            source = continue_features(source, earlier_folder)
        files = [*source.files, *filter(None, [parse_split(config.split).file])]
        _check_out(files, out, copies.fetched)
        plan = plan_of(config, [*files, *([] if earlier_folder is None else [earlier_folder / MANIFEST_NAME])])
        if (kinds := begin(folder, plan, known)) != known:
            known = kinds  # which a run that was killed found
            continue
        source = source if base is None else base.followed_by(source)
        job = Job(folder / DATASET_NAME, folder / WORK_NAME, config, source, rules, earlier, base)
        try:
            with wrap_write_errors(out, folder), job.engine(before, files, copies.on_stage) as engine:
                return job.run(engine), job.added
        except TextIdsError as error:  # columns that began with integers
            (found,) = error.args
            for name in filter(earlier.__contains__, found):
                kind = f"{name} of {config.vocabulary or out} is {earlier[name].summary.kind}"
                remedy = "write all ids alike, or preprocess both logs at once"
                raise DataError(f"{found[name]}, and {kind}; {remedy}") from None
            known |= dict.fromkeys(found, "text")


def _rules_of_counted(config: PreprocessConfig, rules: Mapping[str, str]) -> dict[str, str]:
    """Return the rules of ids of the columns with a least count, given those of all; a ConfigError if it has no effect.

    Only a vocabulary can lack values.
    """
    unknown = parse_unknown(config.unknown)
    for name in (counted := parse_min_count(config.min_count)):
        column = name.removesuffix("_id")
        if rules[name] not in (AUTO, DENSE):
            reason = f"the ids of {column}s are {rules[name]}, without a vocabulary; give --ids {column}=dense, or"
        elif unknown.get(name, "append") != "append":
            reason = f"new {column}s get no ids, as unknown is {unknown[name]} for them;"
        else:
            continue
        raise ConfigError(f"min_count={config.min_count!r} has no effect: {reason} leave {column} out of it")
    return dict.fromkeys(counted, DENSE)


def _check_out(files: Sequence[Path], out: Path | Remote, fetched: Sequence[Remote] = ()) -> None:
    """Raise a ConfigError if replacing the output would remove what is read."""
    replaced: Sequence[Path | Remote] = [file for file in fetched if f"{file}".startswith(f"{out}/")]
    if isinstance(out, Path):
        replaced = [path for path in files if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(out))]
    if replaced:
        raise ConfigError(f"{replaced[0]} is read, and would be replaced with {out}; choose another output folder")


def plan_of(config: PreprocessConfig, files: Iterable[Path]) -> dict[str, Any]:
    """Return everything that a dataset depends on; files count by their sizes and times of change."""
    # Whichever engine it is, which needs absolute paths or not.
    same = replace(
        config, out="", overwrite=False, raw_dir=Path("raw"), engine="local", ray_address=None, memory_limit=None
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


def open_source(
    config: PreprocessConfig,
    *,
    rules: Mapping[str, str],
    known: Mapping[str, IdKind] = MappingProxyType({}),
    first_ms: Mapping[str, int] = MappingProxyType({}),
    show_progress: bool = False,
) -> Interactions:
    """Open the raw files of a dataset, which are downloaded if they are missing; events are read lazily.

    `rules` are those of the ids; `known` are types of ids of a custom log that its first rows do not decide,
    `first_ms` its least times, as in `read_tabular`.
    """
    if config.dataset == SYNTHETIC and config.expand is not None:
        expansion = parse_expansion(config.expand)
        chosen = {name: getattr(config, name) for name in ("out", "raw_dir", "engine")}
        base = PreprocessConfig(dataset=expansion.base, split="none", **chosen)
        opened = open_source(base, rules=rules, show_progress=show_progress)
        return expand_interactions(opened, expansion, seed=config.seed)
    if config.dataset == SYNTHETIC:
        return draw_interactions(config.synthetic or SyntheticConfig(), seed=config.seed)
    log, public = config.custom, CATALOG.get(config.dataset)
    if public is not None:
        raw_dir = config.raw_dir.absolute() if config.engine == "ray" else config.raw_dir
        log = public.log_in(ensure_raw_files(public, raw_dir, show_progress=show_progress))
        rules, known = dict.fromkeys(rules, KEEP), {}  # all ids are integers
    if log is None:
        raise ConfigError("dataset 'custom' has no description; set `custom` to a TabularConfig")
    second = parse_split(config.split).file
    if second is None or not (files := second_log(second, log)):
        counts_from_start = public is not None and public.counts_from_start
        return replace(read_tabular(log, rules, known, first_ms), counts_from_start=counts_from_start)
    # The file of the split is a log too, whose events have a mark.
    both = read_tabular(replace(log, events=(*log.events, second)), rules, known, first_ms)
    marks = [0] * (len(both.parts) - len(files)) + [1] * len(files)
    parts = [
        replace(part, expand=partial(_mark_log, in_eval=mark)) for part, mark in zip(both.parts, marks, strict=True)
    ]
    return replace(both, parts=parts, has_eval_log=True)


def _mark_log(events: Columns, in_eval: int) -> list[Columns]:
    return [events | {IN_EVAL: np.full(len(events[USER_ID]), in_eval, dtype=np.int32)}]
