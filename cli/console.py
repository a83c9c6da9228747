"""How commands speak: results on standard output, progress on standard error and only where a person is looking."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

stdout = Console(highlight=False, soft_wrap=True, markup=False)
stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being done; it shows nothing where standard error is not a terminal."""
    with _progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        task = progress.add_task("starting")
        yield lambda stage: progress.update(task, description=stage)


@contextlib.contextmanager
def steps(description: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Give a function to call after each of `total` steps; `shown` on one of several ranks."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _progress(*columns, shown=shown) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def _progress(*columns: ProgressColumn, shown: bool = True) -> Progress:
    return Progress(*columns, console=stderr, transient=True, disable=not (shown and stderr.is_terminal))
