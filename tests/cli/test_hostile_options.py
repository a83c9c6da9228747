from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from evenrank.cli.fit import fit_command
from evenrank.cli.inspect_balance import inspect_balance_command
from evenrank.cli.inspect_dataset import inspect_command
from evenrank.cli.metrics import metrics_command
from evenrank.cli.preprocess import preprocess_command
from evenrank.cli.simulate import simulate_command
from evenrank.core.errors import RankError
from tests.cli.programs import evenrank
from tests.dataloader.balance.metrics.example_steps import STEPS
from tests.dataloader.balance.metrics.example_steps import write as write_log

VALUES = ["nan", "inf", "-1", "0", "0.5", "1e308", str(2**31), str(2**63), str(2**100), "9" * 5000, "", "[/x]"]
VALUES += ["\x1b[31m", "\udcff", ",", "none"]
SPLITS = ["user:nan", "user:1e400", f"leave-last:{2**31}", f"leave-last:{2**100}", "time:2020-01-01T00:00:00+99:99"]
SPLITS += ["time:last:999999999w", "time:last:\u0663d", "file:", "file:.", "file:nowhere.txt", "file:log.csv"]
SPLITS += ["time:0001-01-01T00:00+23:59", "time:9999-12-31T23:59:59-23:59", "time:" + "9" * 5000, "time:\u0663", ":"]
DISTRIBUTIONS = [f"uniform:high={2**100}", f"uniform:high={10**18}", "uniform:low=", "uniform:=,", "zipf:,,=,"]
DISTRIBUTIONS += ["lognormal:mean=nan", "lognormal:std=inf", "lognormal:mean=1e-308,std=1e308", "normal:std=1e308"]
DISTRIBUTIONS += ["normal:mean=inf,std=nan", "normal:mean=1e308,std=1e308", "zipf:exponent=nan", "zipf:exponent=1e308"]
DISTRIBUTIONS += ["zipf:exponent=100,high=none", "clipped-zipf:exponent=inf", "histogram:path=nowhere"]
COSTS = [":", "a:", ":a", ".:a", "a:b", "os:path.x", "padded:"]
# Further values of options, and of the first argument.
FURTHER: dict[tuple[str, str | None], list[str]] = {
    ("preprocess", "--split"): SPLITS,
    ("preprocess", "--lengths"): DISTRIBUTIONS,
    ("simulate", "--cost"): COSTS,
    ("inspect_balance", "--cost"): COSTS,
    ("simulate", None): ["log.jsonl", "log.npy", *DISTRIBUTIONS, "\u0663:mean=\u0663"],
}
# Where a value that is accepted takes a second.
FEWER = {("inspect", "--html"): ["", "9" * 5000, "\udcff", "."]}
# What is passed besides the option.
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "preprocess": (preprocess_command, "--dataset synthetic --users 9 --items 5 --out out"),
    "custom": (preprocess_command, "--dataset custom --events log.csv --out out"),
    "inspect": (inspect_command, "DATA"),
    "simulate": (simulate_command, "uniform:high=9 --ranks 2 --batch-size 2 --steps 1"),
    "metrics": (metrics_command, "log.jsonl"),
    "fit": (fit_command, "log.jsonl"),
    "inspect_balance": (inspect_balance_command, "DATA"),
}


def _parameters() -> Iterator[tuple[str, str | None]]:
    for name, (command, _) in COMMANDS.items():
        app = typer.Typer()
        app.command()(command)
        for parameter in typer.main.get_command(app).params:
            option = max(parameter.opts, key=len)
            if option != "--help" and not getattr(parameter, "is_flag", False):
                yield name, option if option.startswith("--") else None


@pytest.mark.parametrize(("name", "option"), list(_parameters()))
def test_a_hostile_value_is_accepted_or_gives_one_line_and_leaves_nothing(
    name: str, option: str | None, small_dataset: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "log.csv").write_text("user_id,item_id,timestamp\n1,2,3\n")
    write_log(here / "log.jsonl", *STEPS)
    (here / "log.npy").write_bytes(b"\x93NUMPY")
    before = sorted(here.rglob("*"))
    if name == "inspect_balance":
        for variable in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(variable, "1")

        def refuse(*arguments: object, **options: object) -> None:
            raise RankError("all options were accepted")

        monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    command, others = COMMANDS[name]
    first, *rest = others.replace("DATA", str(small_dataset)).split()
    for value in FEWER.get((name, str(option)), [*VALUES, *FURTHER.get((name, option), ())]):
        arguments = [value, *rest] if option is None else [first, *rest, f"{option}={value}"]
        run = evenrank(*arguments, command=command)
        assert run.returncode in (0, 2), (value, run.stderr)
        if run.returncode == 2:
            is_line = run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
            assert is_line or run.stderr.startswith("Usage: "), (value, run.stderr)
            assert sorted(here.rglob("*")) == before, value
        for path in sorted(set(here.rglob("*")) - set(before), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
