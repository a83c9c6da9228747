"""Reports on datasets: simulated gains, and the numbers, plots and templates of self-contained HTML pages.

Pages have no scripts, and need no other files and no network.
"""

import json
from pathlib import Path

from evenrank.core.errors import escape_controls


def render_template(template: str, **values: object) -> str:
    """Return the HTML of a template of the folder `templates/`; `number` formats numbers, `rows` those of a table."""
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
    environment.filters["rows"] = lambda table: zip(*(column.cells for column in table.columns), strict=True)
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
