"""What `evenrank` prints of itself, completes, and says of mistakes."""

import re
import signal
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import evenrank as package
from evenrank.cli import console
from evenrank.cli.inspect_dataset import inspect_command
from evenrank.cli.options import costs_by_name, page_path, write_page
from evenrank.core.errors import ConfigError, DataError, MissingPackageError, RankLostError
from evenrank.dataloader.balance import STRATEGIES
from evenrank.preprocess.read.times import UNITS
from tests.cli.programs import evenrank, printed
from tests.cli.test_preprocess import OPTIONS, flag
from tests.dataloader.balance.metrics.example_steps import STEPS, TIMED_STEPS
from tests.dataloader.balance.metrics.example_steps import write as write_log

COMMANDS = ("preprocess", "semantic-ids", "inspect", "simulate", "metrics", "fit", "inspect-balance", "demo", "warmup")
SECTIONS = {
    "preprocess": "Dataset|Splits and filters|Ids|Logs (--dataset custom)|Features (--dataset custom)|"
    "Synthetic data (--dataset synthetic)|Options",
    "simulate": "Arguments|Steps|Balancing|Cost|Options",
}
MISTAKES = [
    pytest.param(*line.split(" -> ", 1), id=line[:70])
    for line in (Path(__file__).parent / "mistakes.txt").read_text().splitlines()[1:]
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exits_with_2(here: Path, arguments: str, message: str) -> None:
    write_log(here / "run.jsonl", *STEPS)
    write_log(here / "timed.jsonl", *TIMED_STEPS)
    (here / "bad.jsonl").write_text('{"epoch": 0}\n')
    (here / "broken.py").write_text("def cost(\n")
    (here / "loop.jsonl").symlink_to(here / "loop.jsonl")
    for name in ("empty.jsonl", "empty.npy", "empty.parquet", "run.txt"):
        (here / name).touch()
    for name, values in (("bad", [1.5]), ("negative", [1, -1]), ("none", np.zeros(0, dtype=np.int64))):
        np.save(here / f"{name}.npy", values)
    pq.write_table(pa.table({"a": [1], "b": [2]}), here / "two.parquet")
    before = {path.name: path.read_bytes() for path in here.iterdir() if path.exists()}
    words = arguments.split()
    for run in (
        evenrank(*words),
        *([evenrank(*words, "--json")] if words[0] in ("simulate", "metrics", "fit") else ()),
    ):
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
        assert run.stderr.startswith(f"error: {message}")
    assert {path.name: path.read_bytes() for path in here.iterdir() if path.exists()} == before


def test_help_and_version_are_printed_by_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed("--version") == f"evenrank {package.__version__}\n"
    text = printed()
    assert text.startswith("Usage: evenrank [OPTIONS] COMMAND [ARGS]...\n\n  The data side of multi-GPU training")
    assert text == printed("-h") == printed("--help")
    assert tuple(re.findall(r"^  (\S+)  ", text.partition("Commands:")[2], re.M)) == COMMANDS
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        helps = {command: printed(command, "--help") for command in COMMANDS}
        for command, text in helps.items():
            assert text == printed(command, "-h")
            assert max(map(len, text.splitlines())) <= width
            assert not re.search(r"<\w+", text), command  # the name of a type
        for command, sections in SECTIONS.items():
            assert re.findall(r"^(\S.*):$", helps[command], re.M)[-len(sections.split("|")) :] == sections.split("|")
        options = helps["preprocess"][helps["preprocess"].index("Dataset:") :]
        assert width - 10 < max(map(len, options.splitlines())) < width
        found = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", options, re.M))
        assert found == {"--dataset", "--config", "--help", *map(flag, OPTIONS)}
    assert ", ".join(STRATEGIES) in " ".join(helps["simulate"].split())
    for shown in ("--out FOLDER ", "--split RULE ", "--user-column COLUMN ", "--columns COLUMN,... ", "--users COUNT "):
        assert f"  {shown}" in helps["preprocess"]
    assert "evenrank preprocess --dataset ml-20m --raw-dir raw --out out/ml-20m" in helps["preprocess"]
    of_script = evenrank("--help", command=inspect_command).stdout  # no completion of shells
    assert re.findall(r"^  (?:-h, )?(--[a-z-]+)", of_script, re.M) == ["--html", "--json", "--help"]


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("wa", ["warmup"]),
        ("simulate x --str", ["--strategy"]),
        ("simulate x --strategy ", STRATEGIES),
        ("simulate x --strategy none,l", ["none,lpt-swap"]),
        ("simulate x --cost ", costs_by_name()),
        ("preprocess --dataset ml-1", ["ml-1m"]),
        ("preprocess --timestamp-unit ", UNITS),
        ("preprocess --config no.toml --seed 1 --seed 2 --on-error ", ["fail", "skip"]),
    ],
)
def test_shells_complete_commands_options_and_choices(
    monkeypatch: pytest.MonkeyPatch, line: str, completed: Collection[str]
) -> None:
    words = ["evenrank", *line.split(" ")]
    for name, value in {"_EVENRANK_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert sorted(printed().split()) == sorted(completed)


EVIL, ESCAPED = "\x1b[31m\x07\x9b2J\u202e", r"\x1b[31m\x07\x9b2J\u202e"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


@pytest.mark.parametrize("kind", [ConfigError, MissingPackageError, RankLostError, OSError])
def test_a_command_that_fails_prints_one_printable_line(kind: type[Exception]) -> None:
    def command() -> None:
        raise kind(f"a\r\nb{EVIL}")

    run = evenrank(command=command)
    (line,) = run.stderr.splitlines()
    assert (run.returncode, line.isprintable(), line.startswith("error: ")) == (2, True, True)
    assert rf"a\r\nb{ESCAPED}" in line


def test_tables_texts_progress_and_usage_errors_are_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = console.new_table(EVIL, "wide header", left=[EVIL])
    table.add_row(f"[/x] {EVIL}", "1")
    console.print_result(table)
    console.print_result(f"{EVIL}\n[/x] :warning:")
    output = capsys.readouterr().out
    assert (output.count(ESCAPED), CONTROLS.search(output)) == (3, None)
    assert f"{ESCAPED}\n[/x] :warning:\n" in output
    assert re.search(rf"^ *\[/x\] {re.escape(ESCAPED)} {{5,}}1 *$", output, re.M)  # to the left, and to the right
    for arguments in ((f"--{EVIL}",), ("inspect", "a", EVIL), ("preprocess", f"--{EVIL}"), (EVIL,)):
        run = evenrank(*arguments)
        assert (run.returncode, CONTROLS.search(run.stderr), "\\x1b[31m" in run.stderr) == (2, None, True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with console.stages() as on_stage:
        on_stage(f"reading [/x] {EVIL}")
    assert f"reading [/x] {ESCAPED}" in capsys.readouterr().err
    with console.stages(shown=False) as on_stage:  # on all ranks but one
        on_stage("importing torch")
    assert capsys.readouterr().err == ""


def test_the_page_is_next_to_its_data_and_never_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "out" / "ml.v2"
    data.mkdir(parents=True)
    (tmp_path / "link").symlink_to(data)
    monkeypatch.chdir(data)
    assert page_path(data, None) == page_path(Path(), None) == tmp_path / "out" / "ml.v2-report.html"
    monkeypatch.chdir(tmp_path / "out")
    assert page_path(Path("ml.v2"), None) == Path("ml.v2-report.html")  # as it was typed
    assert page_path(data, tmp_path / "x.html") == tmp_path / "x.html"
    for inside in (tmp_path / "link" / "page.html", Path("ml.v2/train/page.html")):
        with pytest.raises(ConfigError, match="is inside the dataset"):
            page_path(data, inside)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "new" / "page.html"
    write_page(page, "old")

    def fail(self: Path, target: Path) -> None:
        assert self.read_text() == "new"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DataError, match=r"page\.html could not be written: No space left on device; choose another"):
        write_page(page, "new")
    assert page.read_text() == "old"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_a_signal_has_its_own_exit_code() -> None:
    def command() -> None:
        signal.raise_signal(signal.SIGINT)

    run = evenrank(command=command)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "error: stopped by SIGINT\n")
