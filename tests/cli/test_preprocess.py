"""Every option of `preprocess`, from the command line and from a file, with every dataset."""

import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from evenrank.cli.preprocess import check_options, preprocess_command
from evenrank.core.errors import ConfigError, DataError
from evenrank.datasets import open_store
from evenrank.preprocess.read.public import CATALOG, DATASETS
from tests.cli.programs import Evenrank

PUBLIC = {*CATALOG, "all"}
EVERY = {*PUBLIC, "synthetic", "expanded", "custom"}
assert {*DATASETS, "all", "expanded"} == EVERY
CUSTOM, DRAWN = {"custom"}, {"synthetic"}
NAMES = ["a", "b"]
# A value of each option, the datasets that it applies to, and the options that it needs.
OPTIONS: dict[str, tuple[Any, set[str], dict[str, Any]]] = {
    "out": ("out", EVERY, {}),
    "overwrite": (True, EVERY, {}),
    "raw_dir": ("raw", {*PUBLIC, "expanded"}, {}),
    "on_error": ("skip", EVERY - DRAWN, {}),
    "rejects": (True, EVERY - DRAWN, {"on_error": "skip"}),
    "append": (True, CUSTOM, {}),
    "engine": ("ray", EVERY, {}),
    "ray_address": ("auto", EVERY, {"engine": "ray"}),
    "memory_limit": (2.0, EVERY, {}),
    "split": ("file:users.txt", EVERY, {}),
    "eval_fraction": (0.5, EVERY, {}),
    "seed": (0, EVERY, {}),
    "allow_empty": (True, EVERY, {}),
    "k_core": (1, EVERY, {}),
    "min_length": (2, EVERY, {}),
    "max_length": (9, EVERY, {}),
    "window": (8, EVERY, {}),
    "stride": (4, EVERY, {"window": 8}),
    "requests": (60.0, EVERY, {}),
    "by_date": (True, EVERY, {"requests": 60.0}),
    "ids": ("dense", EVERY, {}),
    "vocabulary": ("old", EVERY - {"all"}, {}),
    "unknown": ("oov", EVERY, {"vocabulary": "old"}),
    "events": (["log.csv", "a,b.csv"], CUSTOM, {}),
    "delimiter": (";", CUSTOM, {}),
    "columns": (NAMES, CUSTOM, {}),
    "user_column": ("user_id", CUSTOM, {}),
    "item_column": ("item_id", CUSTOM, {}),
    "timestamp_column": ("timestamp", CUSTOM, {}),
    "timestamp_unit": ("auto", CUSTOM, {}),
    "action_columns": (NAMES, CUSTOM, {}),
    "action_map": ("values:a,b", CUSTOM, {"action_columns": ["a"]}),
    "event_columns": (["a:int=0", "b"], CUSTOM, {}),
    "compute": (["a=1 if b in (1, 2) else 0", "c:float=b"], CUSTOM, {}),
    "label": ("a:int", CUSTOM, {}),
    "weight": ("a", CUSTOM, {}),
    "context": ("users.csv", CUSTOM, {"context_columns": NAMES}),
    "context_columns": (NAMES, CUSTOM, {"context": "users.csv"}),
    "context_header": (NAMES, CUSTOM, {"context": "users.csv", "context_columns": NAMES}),
    "item_features": (["items.csv", "a,b.csv"], CUSTOM, {"item_columns": NAMES}),
    "item_columns": (NAMES, CUSTOM, {"item_features": ["items.csv"]}),
    "item_features_as": ("events", CUSTOM, {"item_features": ["items.csv"], "item_columns": NAMES}),
    "users": (20_000, DRAWN, {}),
    "items": (50_000, DRAWN, {}),
    "lengths": ("histogram:path=data,column=length", DRAWN, {}),
    "item_exponent": (0.5, DRAWN, {}),
    "actions": ("histogram:path=data,column=action", DRAWN, {}),
    "contextual": (["a=uniform:high=2", "b=histogram:path=data"], DRAWN, {}),
    "drift": ("days=3,new_items=0.1", DRAWN, {}),
    "expand": ("ml-20m:2x2", {"synthetic", "expanded"}, {}),
}
NEEDED: dict[str, dict[str, Any]] = {
    "custom": {"events": ["log.csv"]},
    "expanded": {"dataset": "synthetic", "expand": "ml-1m:2x2"},
}


APP = typer.Typer(add_completion=False)
APP.command()(preprocess_command)
COMMAND: Any = typer.main.get_command(APP)


OTHERS: dict[type, Any] = {bool: False, int: 7, float: 0.7, list: ["x"]}  # values that differ from those above


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def on_command_line(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if value is True:
            yield flag(name)
        else:
            repeated = (
                value
                if name in ("events", "contextual", "compute", "item_features")
                else [",".join(value) if isinstance(value, list) else value]
            )
            yield from (text for one in repeated for text in (flag(name), str(one)))


def parse(options: Mapping[str, Any], file: Path, in_file: Collection[str]) -> Any:
    """Parse options, some of which are in a file, and check them; return the values of all parameters."""
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items() if name in in_file))
    given = {name: value for name, value in options.items() if name not in in_file}
    context = COMMAND.make_context("preprocess", [*on_command_line(given), *["--config", str(file)] * bool(in_file)])
    check_options(context)
    return {name: value for name, value in context.params.items() if name != "config_file"}


def test_every_option_is_classified() -> None:
    assert {"dataset", "config_file", *OPTIONS} == {parameter.name for parameter in COMMAND.params}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_applies_to_a_dataset_or_the_error_names_both(name: str, here: Path) -> None:
    file = Path("log.toml")
    value, datasets, needed = OPTIONS[name]
    for dataset, in_file in itertools.product(sorted(EVERY), ((), (name,), ("dataset",), (name, "dataset"))):
        options = {"dataset": dataset, **NEEDED.get(dataset, {}), name: value}
        if dataset in datasets:
            if (name, dataset) != ("unknown", "all"):  # whose --vocabulary is refused
                assert parse({**options, **needed}, file, in_file)["dataset"] == options["dataset"]
            continue
        with pytest.raises(ConfigError) as caught:
            parse(options, file, in_file)
        subject, _, place = str(caught.value).partition(", not to ")
        assert subject.startswith(f"{as_given(name, value, file if name in in_file else None)} applies to ")
        chosen = as_given("dataset", options["dataset"], file if "dataset" in in_file else None)
        assert (
            place == f"{'--expand ml-1m:2x2' if dataset == 'expanded' and datasets == DRAWN else chosen}; leave it out"
        )


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_in_a_file_is_the_same_as_on_the_command_line(name: str, here: Path) -> None:
    value, datasets, needed = OPTIONS[name]
    dataset = next(dataset for dataset in ("synthetic", "custom", "ml-1m") if dataset in datasets)
    options = {"dataset": dataset, **NEEDED.get(dataset, {}), **needed, name: value}
    given = parse(options, Path("log.toml"), ())
    assert json.loads(json.dumps(given[name], default=str)) == value
    assert parse(options, Path("log.toml"), options.keys()) == given
    other = {"events": ["x"], "item_features": ["x"], "compute": ["x=y"], "contextual": ["x=zipf"]}.get(
        name, OTHERS.get(type(value), "x")
    )
    Path("other.toml").write_text(f"{name} = {json.dumps(other)}\n")
    context = COMMAND.make_context("preprocess", [*on_command_line(options), "--config", "other.toml"])
    check_options(context)
    assert context.params | {"config_file": None} == given | {"config_file": None}
    with pytest.raises(ConfigError, match=re.escape(f"wrong.toml: {name} must be ")):
        parse({name: [[]]}, Path("wrong.toml"), (name,))


@pytest.mark.parametrize(
    ("given", "needed"),
    {
        "stride": "window",
        "by_date": "requests",
        "unknown": "vocabulary",
        "context": "context_columns",
        "context_columns": "context",
        "context_header": "context",
        "item_features": "item_columns",
        "item_columns": "item_features",
        "item_features_as": "item_features",
        "action_map": "",
    }.items(),
)
def test_an_option_without_the_one_that_it_needs_is_an_error(here: Path, given: str, needed: str) -> None:
    assert given in {name for name, (_, _, others) in OPTIONS.items() if others}
    options = {"dataset": "custom", "events": ["log.csv"], given: OPTIONS[given][0]}
    message = f"has no effect without {flag(needed)}; give both, or leave it out"
    if not needed:
        message = "applies to --action-columns COLUMN, not to --action-columns ; leave it out"
    for in_file in ((), (given,)):
        subject = as_given(given, options[given], Path("log.toml") if in_file else None)
        with pytest.raises(ConfigError, match=re.escape(f"{subject} {message}")):
            parse(options, Path("log.toml"), in_file)


def as_given(name: str, value: Any, file: Path | None) -> str:
    """Return how messages show an option of the command line or of a file."""
    if file is not None:
        return f"{name} = {shown(value)} in {file}"
    return flag(name) if value is True else f"{flag(name)} {shown(value)}"


def shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else "true" if value is True else str(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"action_columns": NAMES, "action_map": "stars"},
            "{action_map} applies to --action-columns COLUMN, not to {0}",
        ),
        (
            {"timestamp_unit": "row", "timestamp_column": "t"},
            "{timestamp_column} applies to --timestamp-unit other than row, not to {0}",
        ),
        ({"vocabulary": "old", "ids": "keep"}, "{ids} applies to commands without --vocabulary, not to {0}"),
        (
            {"split": "leave-last:1", "seed": 0},
            "{seed} applies to --split user:FRACTION or --dataset synthetic, not to {0}",
        ),
    ],
)
def test_options_that_exclude_each_other_are_named_with_their_places(
    here: Path, options: dict[str, Any], message: str
) -> None:
    for in_file in itertools.chain.from_iterable(itertools.combinations(options, count) for count in range(3)):
        texts = {
            name: as_given(name, value, Path("log.toml") if name in in_file else None)
            for name, value in options.items()
        }
        expected = f"{message.format(*texts.values(), **texts)}; leave it out"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            parse({"dataset": "custom", "events": ["log.csv"], **options}, Path("log.toml"), in_file)


def test_of_two_options_that_define_the_split_the_one_on_the_command_line_wins(here: Path) -> None:
    options = {"dataset": "ml-1m", "split": "leave-last:1", "eval_fraction": 0.5}
    for in_file, split in (("split", "user:0.5"), ("eval_fraction", "leave-last:1")):
        assert parse(options, Path("log.toml"), (in_file,))["split"] == split
    for both, texts in (
        ((), "--eval-fraction 0.5 and --split leave-last:1"),
        (("split", "eval_fraction"), "eval_fraction = 0.5 in log.toml and split = leave-last:1 in log.toml"),
    ):
        with pytest.raises(ConfigError, match=f"{texts} both define the split; pass one of them"):
            parse(options, Path("log.toml"), both)


def test_paths_in_a_file_are_relative_to_its_folder(here: Path) -> None:
    texts = {"out": "out", "split": "file:users,x.txt", "events": ["a.csv", "/b.csv"], "context": "users.csv"}
    options = {"dataset": "custom", **texts, "vocabulary": "../old", "item_features": "items.csv", "label": "file:x"}
    options |= {"context_columns": NAMES, "item_columns": NAMES}
    (here / "sub").mkdir()
    values = parse(options, Path("sub", "log.toml"), options)
    assert values["split"] == "file:sub/users,x.txt"
    assert values["events"] == [Path("sub/a.csv"), Path("/b.csv")]
    assert values["item_features"] == [Path("sub/items.csv")]
    assert [str(values[name]) for name in ("out", "context", "vocabulary", "label")] == [
        *("sub/out", "sub/users.csv", "sub/../old"),
        "file:x",  # a column
    ]
    options = {"dataset": "synthetic", "lengths": "histogram:column=length,path=a", "split": "file:/users.txt"}
    values = parse(options, Path("sub", "log.toml"), options)
    assert (values["lengths"], values["split"]) == ("histogram:column=length,path=sub/a", "file:/users.txt")


def test_names_may_have_commas_one_needs_no_list_and_the_command_line_turns_off_what_a_file_turns_on(
    here: Path,
) -> None:
    options = {"dataset": "custom", "events": "log.csv", "columns": ["price, EUR", " b"], "action_columns": "a,b"}
    values = parse(options, Path("log.toml"), options)
    assert (values["columns"], values["action_columns"]) == (("price, EUR", " b"), ("a,b",))
    assert values["events"] == [Path("log.csv")]
    arguments = ["--dataset", "custom", "--events", "log.csv", "--columns", "a,b", "--columns", "c"]
    assert COMMAND.make_context("preprocess", arguments).params["columns"] == ("a", "b", "c")
    Path("log.toml").write_text("allow_empty = true\noverwrite = true\n")
    arguments = ["--dataset", "ml-1m", "--config", "log.toml", "--no-allow-empty"]
    params = COMMAND.make_context("preprocess", arguments).params
    assert (params["allow_empty"], params["overwrite"]) == (False, True)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("events = ", DataError, "log.toml is not valid TOML"),
        ("a = " + "[" * 9999, DataError, "log.toml is not valid TOML"),
        ("xyz = 1", ConfigError, "log.toml has the unknown key 'xyz'; known keys are dataset, out, overwrite, append"),
        ("user-column = 1", ConfigError, "log.toml has the unknown key 'user-column'; did you mean user_column or "),
        ('config = "x.toml"', ConfigError, "log.toml has the unknown key 'config'"),
        ("seed = 1\nseed = 2", DataError, "log.toml is not valid TOML (Cannot overwrite a value"),
        ("events = 3", ConfigError, "log.toml: events must be a string or a list of strings, got 3"),
        ('columns = ["a", 3]', ConfigError, "log.toml: columns must be a string or a list of strings, got ['a', 3]"),
        ('context = ["b"]', ConfigError, "log.toml: context must be a string, got ['b']"),
        ('k_core = "5"', ConfigError, "log.toml: k_core must be an integer, got '5'"),
        ("k_core = true", ConfigError, "log.toml: k_core must be an integer, got True"),
        ("users = 2.5", ConfigError, "log.toml: users must be an integer, got 2.5"),
        ("requests = false", ConfigError, "log.toml: requests must be a number, got False"),
        ("allow_empty = 1", ConfigError, "log.toml: allow_empty must be true or false, got 1"),
        ("split = 2015-01-06", ConfigError, "log.toml: split must be a string, got datetime.date(2015, 1, 6)"),
        ('out = "a\\u0000b"', ConfigError, "log.toml: out must be a string, got 'a\\x00b'"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_the_file_and_the_key(
    here: Path, text: str, error: type[Exception], message: str
) -> None:
    Path("log.toml").write_text(text)
    with pytest.raises(error, match=re.escape(message)) as caught:
        COMMAND.make_context("preprocess", ["--config", "log.toml", "--dataset", "custom"])
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
def test_a_named_pipe_is_refused_instead_of_waited_for(here: Path) -> None:
    os.mkfifo("pipe")
    with pytest.raises(DataError, match="pipe is a named pipe, not a regular file"):
        COMMAND.make_context("preprocess", ["--config", "pipe"])


LOG = """dataset = "custom"
out = "out"
events = "log.csv"
user_column = "uid"
timestamp_column = "time"
timestamp_unit = "s"
split = "none"
"""


def test_a_file_can_have_all_options_of_a_run_and_mistakes_name_it(tmp_path: Path, evenrank: Evenrank) -> None:
    (tmp_path / "log.csv").write_text("uid,item_id,time\n1,10,1420070400\n1,11,1420070401\n")
    config = tmp_path / "log.toml"
    config.write_text(LOG)
    run = evenrank("preprocess", "--config", config)
    assert run.returncode == 0, run.stderr
    assert open_store(tmp_path / "out").columns["timestamp_ms"].tolist() == [1420070400000, 1420070401000]
    (tmp_path / "later.csv").write_text("uid,item_id,time\n1,11,1420070500\n")
    run = evenrank("preprocess", "--config", config, "--events", tmp_path / "later.csv", "--append")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-2:] == [
        "added: 1 event, 0 users, 0 items, 1 file, from 2015-01-01T00:01:40Z to 2015-01-01T00:01:40Z",
        f"next: evenrank inspect {tmp_path / 'out'}",
    ]
    run = evenrank("preprocess", "--config", config, "--users", 9)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    message = "--users 9 applies to --dataset synthetic, not to dataset = custom in "
    assert run.stderr.startswith(f"error: {message}{config};")


def test_distributions_and_drift_of_synthetic_data_are_options(tmp_path: Path, evenrank: Evenrank) -> None:
    command = ["preprocess", "--dataset", "synthetic", "--out", tmp_path / "out", "--users", 50, "--split", "none"]
    options = "--item-exponent 0.5 --actions uniform:low=3,high=3 --contextual a=uniform:high=2 --contextual b=zipf"
    run = evenrank(*command, *options.split(), "--drift", "categories=4,days=3")
    assert run.returncode == 0, run.stderr
    manifest = open_store(tmp_path / "out").manifest
    assert list(manifest.contextual) == ["a", "b"]
    assert manifest.vocabulary_sizes["action"] == 4
    assert manifest.extra_events == {"category": "int64"}
    assert {name: manifest.options[name] for name in ("items", "actions", "contextual", "drift")} == {
        "items": "Zipf(exponent=0.5, low=1, high=50000, shift=0)",
        "actions": "Uniform(low=3, high=3)",
        "contextual": {"a": "Uniform(low=1, high=2)", "b": "Zipf(exponent=1.2, low=1, high=4096, shift=0)"},
        "drift": "Drift(categories=4, days=3.0, share=0.8, new_items=0.3)",
    }


def test_the_rule_of_each_column_of_ids_is_printed_with_both_figures(evenrank: Evenrank, here: Path) -> None:
    def printed(events: str, out: str, *options: str) -> list[str]:
        (here / f"{out}.csv").write_text(f"user_id,item_id,timestamp\n{events}")
        log = ("--dataset", "custom", "--events", here / f"{out}.csv", "--allow-empty", "--split", "none")
        finished = evenrank("preprocess", *log, "--out", out, *options)
        assert finished.returncode == 0, finished.stderr
        return [line for line in finished.stdout.splitlines() if line.startswith(("user_id:", "item_id:"))]

    assert printed("1,1000,0\n2,7,1\n", "auto") == [
        "user_id: kept (2 distinct, largest 2)",
        "item_id: dense (2 distinct, largest 1,000), numbered 1 to 2 by first appearance",
    ]
    assert printed("1,1000,0\n2,7,1\n", "hash", "--ids", "item=hash:1,user=dense") == [
        "user_id: dense (2 distinct, largest 2), numbered 1 to 2 by first appearance",
        "item_id: hash:1 (2 distinct), 2 values share their id with another",
    ]
    assert printed("1,1000,0\n1,8,1\n", "later", "--vocabulary", "auto") == [
        "user_id: kept (largest 1)",
        "item_id: dense (2 distinct, largest 1,000, 1 of them not in the earlier vocabulary), "
        "numbered 1 to 3 by first appearance",
    ]


def test_the_help_has_every_option_in_a_section_that_fits(monkeypatch: pytest.MonkeyPatch, evenrank: Evenrank) -> None:
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        text = evenrank("preprocess", "--help").stdout
        sections = re.findall(r"^(\S.*):$", text, re.M)
        assert sections == [
            *("Dataset", "Splits and filters", "Ids", "Logs (--dataset custom)", "Features (--dataset custom)"),
            *("Synthetic data (--dataset synthetic)", "Options"),
        ]
        assert set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.M)) == {
            *("--dataset", "--config", "--help"),
            *map(flag, OPTIONS),
        }
        options = text[text.index("Dataset:") :].splitlines()
        assert width - 10 < max(map(len, options)) < width
        assert "evenrank preprocess --config examples/recipes/" in text
