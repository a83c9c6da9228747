"""Output of the commands: results on standard output, progress on standard error and only on a terminal.

Rich takes a tenth of a second to import, which `evenrank --help` does not need: it is imported where it is used.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from evenrank.core.errors import escape_controls

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table


_documents: list[dict[str, Any]] = []  # one with `--json`


def collect_numbers(wanted: bool) -> None:
    """Collect the numbers of results from now on instead of printing texts, for `print_numbers`, or do not."""
    _documents[:] = [{}] * wanted


def print_numbers() -> None:
    """Print the numbers that were collected, if any, as one JSON document."""
    while _documents:
        text = json.dumps(_documents.pop(), indent=2, default=lambda x: str(x) if isinstance(x, Path) else asdict(x))
        print_result(text)


def print_result(result: "RenderableType", **numbers: Any) -> None:
    """Print a text or a table to standard output, with control characters escaped, or collect what it is made of."""
    if _documents:
        _documents[0].update(numbers)
    else:
        _console().print(result)


def print_aligned(texts: Mapping[str, str]) -> None:
    """Print one line per label, with the texts below each other."""
    width = max(map(len, texts)) + 1
    for label, text in texts.items():
        print_result(f"{label + ':':{width}} {text}")


def print_error(message: str) -> None:
    """Print one line to standard error; characters that control a terminal or end a line are escaped."""
    typer.echo(f"error: {escape_controls(message)}", err=True)


def new_table(*headers: str, left: Collection[str], narrow: bool = False) -> "Table":
    """Return a table without rows; columns whose headers are not in `left` are aligned to the right.

    `narrow` leaves less space between columns and wraps none, so that many columns fit in 80 characters.
    """
    from rich import box
    from rich.table import Table

    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", no_wrap=narrow)
    return table


def shows_progress() -> bool:
    """Return whether standard error is a terminal, where progress is shown."""
    return _console(stderr=True).is_terminal


@contextlib.contextmanager
def stages(*, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show a spinner while the context is open; yields a function that sets the description of the current stage.

    `shown` is False on all ranks but one, so that spinners do not overwrite each other.
    """
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with _progress(*columns, shown=shown) as progress:
        task = progress.add_task("starting")
        yield lambda stage: progress.update(task, description=escape_controls(stage))


@contextlib.contextmanager
def steps(description: str, total: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a progress bar while the context is open; yields a function to call after each of `total` steps."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _progress(*columns, shown=shown) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def _progress(*columns: "ProgressColumn", shown: bool) -> "Progress":
    from rich.progress import Progress

    console = _console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))


def _console(*, stderr: bool = False) -> "Console":
    from rich.console import Console
    from rich.text import Text

    class SafeConsole(Console):
        # Rich renders every string by this method, also those in the cells of tables. Names of files are printed as
        # they are: without markup, emoji codes and line breaks.
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(escape_controls(text, keep="\n"), **options)

    return SafeConsole(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
