"""A dataset's report as one HTML page that needs nothing else: no script, no other file, no network."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evenrank.cli.reports import dataset_plots
from evenrank.cli.reports.dataset_data import (
    DAY_MS,
    Gain,
    balancing_gain,
    context_values,
    item_popularity,
    length_histogram,
    timeline,
)
from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets.schema import Manifest
from evenrank.datasets.store import SequenceStore, open_store

_TRAIN = "train"
_AUDIT = "audit"  # what preprocessing writes among the options about the split that it made
_TOP_SHARES = (0.01, 0.1)
_Stage = Callable[[str], None]


def page_path(folder: Path, chosen: Path | None) -> Path:
    """Return where the page of the dataset in `folder` goes: `chosen`, or beside the folder.

    Raises:
        ConfigError: that is a folder, or a place inside the dataset, which may hold nothing but the dataset.

    """
    named = folder if folder.name not in ("", "..") else folder.resolve()
    page = named.parent / f"{named.name}-report.html" if chosen is None else chosen
    if page.is_dir():
        raise ConfigError(f"{page} is a folder; --html needs the name of a file")
    if page.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{page} is inside the dataset, which may hold nothing else; choose a file outside {folder}")
    return page


def write_page(page: Path, html: str) -> None:
    """Put the page in place whole, or not at all.

    Raises:
        DataError: it could not be written.

    """
    partial = page.with_name(f".{page.name}.{os.getpid()}.partial")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(html, encoding="utf-8")
            partial.replace(page)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{page} could not be written: {error.strerror or error}; choose another place with --html FILE"
        ) from error


def render_template(template: str, **values: object) -> str:
    """Return the page that one of `templates/` makes of `values`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    return environment.get_template(template).render(values)


def build_page(folder: Path, manifest: Manifest, *, on_stage: _Stage = lambda stage: None) -> str:
    """Open every split of the dataset and return the report on it as HTML.

    Raises:
        DataError: a split is not what the manifest says.

    """
    stores = {}
    for split in manifest.splits:
        on_stage(f"opening {split}")
        stores[split] = open_store(folder, split)
    return render_page(manifest, stores, name=folder.resolve().name, on_stage=on_stage)


def render_page(
    manifest: Manifest, stores: Mapping[str, SequenceStore], *, name: str, on_stage: _Stage = lambda stage: None
) -> str:
    """Return the report as HTML.

    Args:
        manifest: of the dataset.
        stores: each split of it.
        name: what the dataset's folder is called.
        on_stage: called with a few words as each part begins.

    """
    return render_template(
        "report.html.j2",
        manifest=manifest,
        name=name,
        percentiles=list(dict.fromkeys(key for split in manifest.splits.values() for key in split.lengths)),
        options={key: _text(value) for key, value in manifest.options.items() if key != _AUDIT},
        audit=audit if isinstance(audit := manifest.options.get(_AUDIT), dict) else {},
        **_lengths(stores, on_stage),
        **_items(stores, on_stage),
        **_time(stores, on_stage),
        context=_context(manifest, stores, on_stage),
        balance=_balance(stores, on_stage),
    )


def _lengths(stores: Mapping[str, SequenceStore], on_stage: _Stage) -> dict[str, Any]:
    on_stage("measuring histories")
    histogram = length_histogram(stores)
    drawn = any(density.any() for density in histogram.density.values())
    return {
        "lengths_svg": _svg(dataset_plots.lengths_svg(histogram)) if drawn else None,
        "empty_rows": {split: rows for split, rows in histogram.empty.items() if rows},
    }


def _items(stores: Mapping[str, SequenceStore], on_stage: _Stage) -> dict[str, Any]:
    on_stage("counting items")
    popularity = item_popularity(stores)
    counts = popularity.counts
    return {
        "items": len(counts),
        "items_once": int((counts == 1).sum()),
        "top_items": [(share, *popularity.top(share)) for share in _TOP_SHARES],
        "popularity_svg": _svg(dataset_plots.popularity_svg(popularity)) if len(counts) else None,
    }


def _time(stores: Mapping[str, SequenceStore], on_stage: _Stage) -> dict[str, Any]:
    on_stage("counting events over time")
    if (line := timeline(stores)) is None:
        return {"timeline_svg": None, "timeline": None, "time_facts": {}}
    busiest = int(line.counts.argmax())
    times = [line.start_ms + line.width_ms * i for i in (0, len(line.counts), busiest)]
    begin, end, busiest_begin = (dataset_plots.as_time(time, precise=line.width_ms < DAY_MS) for time in times)
    return {
        "timeline_svg": _svg(dataset_plots.timeline_svg(line)),
        "timeline": line,
        "time_facts": {
            "from": begin,
            "until before": end,
            f"busiest {line.unit}, from": busiest_begin,
            "events in it": int(line.counts[busiest]),
            f"events per {line.unit}, mean": float(line.counts.mean()),
        },
    }


def _context(manifest: Manifest, stores: Mapping[str, SequenceStore], on_stage: _Stage) -> list[Any]:
    on_stage("counting context values")
    features = [context_values(stores, feature) for feature in manifest.contextual]
    return [feature for feature in features if feature.rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Balance:
    gains: tuple[Gain, ...] = ()
    svg: Markup | None = None
    absent: str = ""  # why there are no gains


def _balance(stores: Mapping[str, SequenceStore], on_stage: _Stage) -> _Balance:
    on_stage("planning steps")
    if _TRAIN not in stores or len(stores[_TRAIN]) == 0:
        return _Balance(absent="The train split has no rows, so there is nothing to balance.")
    try:
        gains = balancing_gain(stores[_TRAIN].lengths)
    except ModuleNotFoundError as error:  # hosts that only preprocess need no torch
        return _Balance(absent=f"Left out: the planner needs {error.name}, which is not installed here.")
    return _Balance(gains=gains, svg=_svg(dataset_plots.gain_svg(gains)))


def _svg(text: str) -> Markup:
    # Of our own making: the only words of a user in it are names of splits, which matplotlib escapes.
    return Markup(text)


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
