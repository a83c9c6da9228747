"""Self-contained HTML pages: rendered from templates, written atomically; no scripts, other files or network."""

import json
from pathlib import Path

from evenrank.core import files
from evenrank.core.errors import ConfigError, DataError, escape_controls


def page_path(subject: Path, chosen: Path | None) -> Path:
    """Return the path of the page about a dataset or a log: the chosen one, or NAME-report.html next to the subject."""
    is_dataset = subject.is_dir()
    page = chosen
    if page is None:
        named = subject if subject.name not in ("", "..") else subject.resolve()
        page = named.parent / f"{named.name if is_dataset else named.stem}-report.html"
    if page.is_dir():
        raise ConfigError(f"{page} is a folder; --html needs the name of a file")
    if is_dataset and page.resolve().is_relative_to(subject.resolve()):
        raise ConfigError(
            f"{page} is inside the dataset, which may contain nothing else; choose a file outside {subject} with --html"
        )
    if page.resolve() == subject.resolve():
        raise ConfigError(f"{page} is the log, which the page would replace; choose another file with --html")
    return page


def write_page(page: Path, html: str) -> None:
    """Write the page atomically: an existing file is replaced by the complete page or not at all."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(page, html)
    except OSError as error:
        raise DataError(
            f"{page} could not be written: {error.strerror or error}; choose another path with --html FILE"
        ) from error


def render_template(template: str, **values: object) -> str:
    """Return the HTML of a template of the folder `templates/`; the filter `number` formats numbers."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # which tables alone do without

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _format_number
    return environment.get_template(template).render(values)


def _printable(value: object) -> object:
    """Return text with control characters escaped, and HTML, such as plots, as it is."""
    return escape_controls(value, keep="\n\t") if isinstance(value, str) and not hasattr(value, "__html__") else value


def to_text(value: object) -> str:
    """Return a string as it is, and any other JSON value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _format_number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return to_text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
