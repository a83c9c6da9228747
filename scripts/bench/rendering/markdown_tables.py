"""Tables in Markdown."""

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table of cells; the first `left` columns are aligned to the left, the others to the right."""
    alignment = ["---"] * left + ["---:"] * (len(columns) - left)
    lines = [columns, alignment, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
