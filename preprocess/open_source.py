"""A dataset's raw files or distributions, as interactions."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from evenrank.core.errors import ConfigError
from evenrank.datasets.schema import USER_ID, IdKind
from evenrank.preprocess.build.buckets import Columns
from evenrank.preprocess.build.ids import KEEP
from evenrank.preprocess.build.splits import IN_EVAL, parse_split, second_log
from evenrank.preprocess.config import PreprocessConfig
from evenrank.preprocess.options import SyntheticConfig
from evenrank.preprocess.sources.catalog import CATALOG, SYNTHETIC
from evenrank.preprocess.sources.custom import read_tabular
from evenrank.preprocess.sources.download import ensure_raw_files
from evenrank.preprocess.sources.fractal import expand_interactions, parse_expansion
from evenrank.preprocess.sources.interactions import Interactions
from evenrank.preprocess.sources.synthetic import draw_interactions


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
        base_config = PreprocessConfig(dataset=expansion.base, split="none", **chosen)
        base = open_source(base_config, rules=rules, show_progress=show_progress)
        return expand_interactions(base, expansion, seed=config.seed)
    if config.dataset == SYNTHETIC:
        return draw_interactions(config.synthetic or SyntheticConfig(), seed=config.seed)
    log = config.custom
    if config.dataset in CATALOG:
        public = CATALOG[config.dataset]
        raw_dir = config.raw_dir.absolute() if config.engine == "ray" else config.raw_dir
        log = public.log_in(ensure_raw_files(public, raw_dir, show_progress=show_progress))
        rules, known = dict.fromkeys(rules, KEEP), {}  # all ids are integers
    if log is None:
        raise ConfigError("dataset 'custom' has no description; set `custom` to a TabularConfig")
    second = parse_split(config.split).file
    if second is None or not (files := second_log(second, log)):
        return read_tabular(log, rules, known, first_ms)
    # The file of the split is a log too, whose events have a mark.
    interactions = read_tabular(replace(log, events=(*log.events, second)), rules, known, first_ms)
    num_first = len(interactions.parts) - len(files)
    parts = [
        replace(part, expand=partial(_mark_log, in_eval=index >= num_first))
        for index, part in enumerate(interactions.parts)
    ]
    return replace(interactions, parts=parts, has_eval_log=True)


def _mark_log(events: Columns, in_eval: bool) -> list[Columns]:
    return [events | {IN_EVAL: np.full(len(events[USER_ID]), in_eval, dtype=np.int32)}]
