"""A dataset's raw files or distributions, as interactions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import USER_ID, IdKind
from evenrank.preprocess.build.buckets import Columns
from evenrank.preprocess.build.ids import KEEP
from evenrank.preprocess.build.splits import IN_EVAL, parse_split, second_log
from evenrank.preprocess.config import PreprocessConfig
from evenrank.preprocess.log_config import TabularConfig
from evenrank.preprocess.sources.catalog import CATALOG, SYNTHETIC
from evenrank.preprocess.sources.custom import read_tabular
from evenrank.preprocess.sources.download import ensure_raw_files
from evenrank.preprocess.sources.fractal import expand_interactions, parse_expansion
from evenrank.preprocess.sources.interactions import Interactions
from evenrank.preprocess.sources.synthetic import SyntheticConfig, draw_interactions


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
        base = replace(config, dataset=expansion.base, split="none")
        return expand_interactions(
            open_source(base, rules=rules, show_progress=show_progress), expansion, seed=config.seed
        )
    if config.dataset == SYNTHETIC:
        return draw_interactions(config.synthetic or SyntheticConfig(), seed=config.seed)
    log = config.custom
    if config.dataset in CATALOG:
        public = CATALOG[config.dataset]
        log = public.log_in(ensure_raw_files(public, config.raw_dir, show_progress=show_progress))
        rules, known = dict.fromkeys(rules, KEEP), {}  # all ids are integers
    if log is None:
        raise ConfigError("dataset 'custom' has no description; set `custom` to a TabularConfig")
    return _read_logs(
        log, parse_split(config.split).file, partial(read_tabular, rules=rules, known=known, first_ms=first_ms)
    )


def _read_logs(log: TabularConfig, second: Path | None, read: Callable[[TabularConfig], Interactions]) -> Interactions:
    """Open a log and, if the file of the split is a log too, that one, whose events have a mark."""
    if second is None or not (files := second_log(second, log)):
        return read(log)
    interactions = read(replace(log, events=(*log.events, second)))
    num_first = len(interactions.parts) - len(files)
    parts = [
        replace(part, expand=partial(_mark_log, in_eval=index >= num_first))
        for index, part in enumerate(interactions.parts)
    ]
    return replace(interactions, parts=parts, has_eval_log=True)


def _mark_log(events: Columns, in_eval: bool) -> list[Columns]:
    return [events | {IN_EVAL: np.full(len(events[USER_ID]), in_eval, dtype=np.int32)}]
