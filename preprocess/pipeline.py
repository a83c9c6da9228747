"""The whole job: raw files -> interactions -> buckets -> sequences -> splits -> a folder of Parquet files."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.storage import Remote, is_url, locate
from evenrank.datasets.schema import ITEM_ID, MANIFEST_NAME, USER_ID, IdKind, Manifest
from evenrank.preprocess.append import read_base
from evenrank.preprocess.build.ids import AUTO, DENSE, KEEP, parse_ids, parse_unknown
from evenrank.preprocess.build.splits import parse_split
from evenrank.preprocess.build.vocabulary import read_earlier
from evenrank.preprocess.config import PreprocessConfig
from evenrank.preprocess.engine import Threads, Workers, check_not_forked, num_workers
from evenrank.preprocess.files.fetch import Copies, copies_in
from evenrank.preprocess.files.raw_values import TextIdsError
from evenrank.preprocess.job import Job
from evenrank.preprocess.open_source import open_source
from evenrank.preprocess.output.replace import replace_folder, wrap_write_errors
from evenrank.preprocess.output.resume import begin, plan_of
from evenrank.preprocess.output.upload import replace_remote
from evenrank.preprocess.sources.catalog import CATALOG, CUSTOM
from evenrank.preprocess.sources.interactions import number_features


def preprocess(
    config: PreprocessConfig, *, on_stage: Callable[[str], None] = lambda stage: None, show_progress: bool = False
) -> Manifest:
    """Write a dataset to a folder or URL and return its manifest.

    Args:
        config: the dataset, its options and its folder.
        on_stage: called with a short description of the progress.
        show_progress: whether to show a progress bar of downloads on standard error.

    Raises:
        ConfigError, DataError: the message is one line with the cause and the remedy; `config.out` is unchanged.
    """
    check_not_forked()
    out, count = locate(config.out), num_workers(config.memory_limit, are_processes=config.engine == "ray")

    def write(folder: Path) -> Manifest:
        with copies_in(folder / "inputs", on_stage) as copies:
            return _write(folder, _with_copies(config, copies), out, copies, count, show_progress=show_progress)

    if isinstance(out, Remote):
        return replace_remote(out, write, overwrite=config.overwrite, on_stage=on_stage)
    return replace_folder(out, write, overwrite=config.overwrite)


def _with_copies(config: PreprocessConfig, copies: Copies) -> PreprocessConfig:
    """Return the settings with paths of copies in place of URLs, and with paths that lead to logs from all nodes."""
    custom, listed = config.custom, parse_split(config.split).file
    shared = Path.absolute if config.engine == "ray" else Path
    if custom is not None:
        custom = replace(
            custom,
            events=tuple(shared(copies.path_of(path)) for path in custom.events),
            context=custom.context and copies.path_of(custom.context),
            item_features=custom.item_features and copies.path_of(custom.item_features),
        )
    return replace(
        config,
        custom=custom,
        split=f"file:{copies.path_of(listed)}" if listed is not None and is_url(listed) else config.split,
        vocabulary=config.vocabulary and copies.dataset_of(config.vocabulary, needs_rows=False),
    )


def _write(
    folder: Path, config: PreprocessConfig, out: Path | Remote, copies: Copies, count: int, *, show_progress: bool
) -> Manifest:
    base = read_base(copies.dataset_of(config.out).absolute(), config) if config.append else None
    copies.remove_others()
    earlier, earlier_folder = ({}, config.vocabulary) if base is None else (dict(base.ids), base.folder)
    if config.vocabulary is not None:  # so that nothing is appended
        earlier = read_earlier(config.vocabulary, parse_unknown(config.unknown))
    known: dict[str, IdKind] = {name: ids.summary.kind for name, ids in earlier.items()}
    default = AUTO if config.dataset == CUSTOM else DENSE if config.dataset in CATALOG or config.expand else KEEP
    rules = {USER_ID: default, ITEM_ID: default} | parse_ids(config.ids)
    if base is None:
        rules |= {name: ids.summary.rule for name, ids in earlier.items()}
    else:
        base.check_rules(rules)
    on_stage = copies.on_stage
    while True:
        on_stage(f"opening {config.dataset}")
        first_ms = {} if base is None else base.first_ms
        opened = open_source(config, rules=rules, known=known, first_ms=first_ms, show_progress=show_progress)
        for name in earlier:
            if (found_kind := opened.id_kinds[name]) != known[name]:
                which = f"{found_kind} in {config.dataset} and {known[name]} in {config.vocabulary or out}"
                raise ConfigError(f"{name} is {which}; leave the vocabulary out, or give one of that dataset")
        source = number_features(opened, earlier_folder)
        files = [*source.files, *filter(None, [parse_split(config.split).file])]
        _check_out(files, out, copies.fetched)
        plan = plan_of(config, [*files, *([] if earlier_folder is None else [earlier_folder / MANIFEST_NAME])])
        if (kinds := begin(folder, plan, known)) != known:
            known = kinds  # which a run that was killed found
            continue
        try:
            with wrap_write_errors(out, folder), _workers(config, count, [folder, *files]) as workers:
                return Job(folder, config, source, rules, earlier, on_stage, base).run(workers)
        except TextIdsError as error:  # columns that began with integers
            (found,) = error.args
            for name in filter(earlier.__contains__, found):
                kind = f"{name} of {config.vocabulary or out} is {earlier[name].summary.kind}"
                remedy = "write all ids alike, or preprocess both logs at once"
                raise DataError(f"{found[name]}, and {kind}; {remedy}") from None
            known |= dict.fromkeys(found, "text")


def _workers(config: PreprocessConfig, count: int, shared: Sequence[Path]) -> Workers:
    if config.engine == "local":
        return Threads(count)
    from evenrank.preprocess.ray_workers import RayWorkers

    return RayWorkers(config.ray_address, count, shared)


def _check_out(files: Sequence[Path], out: Path | Remote, fetched: Sequence[Remote]) -> None:
    """Raise a ConfigError if replacing the output would remove what is read."""
    replaced: Sequence[Path | Remote] = [file for file in fetched if f"{file}".startswith(f"{out}/")]
    if isinstance(out, Path):
        replaced = [path for path in files if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(out))]
    if replaced:
        raise ConfigError(f"{replaced[0]} is read, and is in {out}, which would be replaced; choose another folder")
