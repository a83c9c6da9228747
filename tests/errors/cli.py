"""Mistakes in files of options and in calls; those of the command line are in tests/cli/mistakes.txt."""

import typer

from evenrank.cli.inspect_balance import check_seen
from evenrank.cli.options import page_path
from evenrank.cli.preprocess import preprocess_command
from evenrank.core.errors import ConfigError, DataError, EvenrankError, RankError
from tests.errors.scene import Row, Scene


def in_file(text: str, line: str, kind: type[EvenrankError] = ConfigError) -> Row:
    """Return a mistake in a file of `preprocess --config`."""

    def parse(scene: Scene) -> None:
        app = typer.Typer(add_completion=False)
        app.command()(preprocess_command)
        arguments = ["--config", str(scene.file("log.toml", text)), "--dataset", "custom"]
        typer.main.get_command(app).make_context("preprocess", arguments)

    return Row(parse, kind, f"<folder>/log.toml{line}")


def seen(of_ranks: list[list[int]], counts: str) -> Row:
    line = f"each of 3 samples should be seen exactly once, but {counts} times in total"
    return Row(lambda _: check_seen(of_ranks, 3), RankError, line)


UNKNOWN, A_LIST = " has the unknown key", "must be a string or a list of strings, got"
INSIDE = "is inside the dataset, which may contain nothing else; choose a file outside <data> with --html"

ROWS = [
    in_file("events = ", " is not valid TOML...", DataError),
    in_file("a = " + "[" * 9999, " is not valid TOML...", DataError),
    in_file("seed = 1\nseed = 2", " is not valid TOML (Cannot overwrite a value...", DataError),
    in_file("xyz = 1", f"{UNKNOWN} 'xyz'; known keys are dataset, out, overwrite, append..."),
    in_file("user-column = 1", f"{UNKNOWN} 'user-column'; did you mean user_column or ..."),
    in_file('config = "x.toml"', f"{UNKNOWN} 'config'..."),
    in_file("events = 3", f": events {A_LIST} 3..."),
    in_file('columns = ["a", 3]', f": columns {A_LIST} ['a', 3]..."),
    in_file('context = ["b"]', ": context must be a string, got ['b']..."),
    in_file('out = "a\\u0000b"', ": out must be a string, got 'a\\x00b'..."),
    in_file("split = 2015-01-06", ": split must be a string, got datetime.date(2015, 1, 6)..."),
    in_file("k_core = true", ": k_core must be an integer, got True..."),
    in_file("users = 2.5", ": users must be an integer, got 2.5..."),
    in_file("requests = false", ": requests must be a number, got False..."),
    in_file("allow_empty = 1", ": allow_empty must be true or false, got 1..."),
    Row(lambda scene: page_path(scene.data, scene.data / "page.html"), ConfigError, f"<data>/page.html {INSIDE}"),
    Row(
        lambda scene: page_path(scene.data, scene.folder), ConfigError, "<folder> is a folder; --html needs the name..."
    ),
    seen([[0], [1]], "2 different samples were seen 2"),
    seen([[0, 1], [1]], "2 different samples were seen 3"),
    seen([[0, 1, 2], [1]], "3 different samples were seen 4"),
]
