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
from tests.cli.programs import evenrank, printed

PUBLIC = {*CATALOG, "all"}
EVERY = {*PUBLIC, "synthetic", "expanded", "custom"}
assert {*DATASETS, "all", "expanded"} == EVERY
CUSTOM, DRAWN, LOGS = {"custom"}, {"synthetic"}, EVERY - {"synthetic"}
NAMES = ["a", "b"]
# A value of each option, the datasets that it applies to, and what it needs, the option that errors name first.
OPTIONS: dict[str, tuple[Any, set[str], dict[str, Any]]] = {
    **{name: (text, EVERY, {}) for name, text in {"out": "out", "split": "file:users.txt", "ids": "dense"}.items()},
    **{name: (True, EVERY, {}) for name in ("overwrite", "allow_empty")},
    **{name: (count, EVERY, {}) for count, name in enumerate(("seed", "k_core", "min_length", "max_length", "window"))},
    **{name: (number, EVERY, {}) for name, number in {"memory_limit": 2.0, "requests": 60.0}.items()},
    "eval_fraction": (0.5, EVERY, {}),
    "raw_dir": ("raw", {*PUBLIC, "expanded"}, {}),
    "on_error": ("skip", LOGS, {}),
    "rejects": (True, LOGS, {"on_error": "skip"}),
    "append": (True, CUSTOM, {}),
    "engine": ("ray", EVERY, {}),
    "ray_address": ("auto", EVERY, {"engine": "ray"}),
    "stride": (4, EVERY, {"window": 8}),
    "by_date": (True, EVERY, {"requests": 60.0}),
    "min_count": ("item=5", EVERY, {}),
    "vocabulary": ("old", EVERY - {"all"}, {}),
    "unknown": ("oov", EVERY - {"all"}, {"vocabulary": "old"}),
    "events": (["log.csv", "a,b.csv"], CUSTOM, {}),
    "delimiter": (";", CUSTOM, {}),
    "columns": (NAMES, CUSTOM, {}),
    **{f"{name}_column": (name, CUSTOM, {}) for name in ("user", "item", "timestamp")},
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
    "item_vectors": ("items.npy", CUSTOM, {}),
    "user_vectors": ("users.parquet", CUSTOM, {}),
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
REPEATED = {"events": ["x"], "item_features": ["x"], "compute": ["x=y"], "contextual": ["x=zipf"]}  # other values, too
OTHERS: dict[type, Any] = {bool: False, int: 7, float: 0.7, list: ["x"]}  # values that differ from those above
APP = typer.Typer(add_completion=False)
APP.command()(preprocess_command)
COMMAND: Any = typer.main.get_command(APP)
FILE = Path("log.toml")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def on_command_line(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        repeated = value if name in REPEATED else [value]
        for one in repeated:
            yield from [flag(name)] if value is True else (flag(name), shown(one))


def parse(options: Mapping[str, Any], file: Path, in_file: Collection[str]) -> Any:
    """Parse options, some of which are in a file, and check them; return the values of all parameters."""
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items() if name in in_file))
    given = {name: value for name, value in options.items() if name not in in_file}
    context = COMMAND.make_context("preprocess", [*on_command_line(given), *["--config", str(file)] * bool(in_file)])
    check_options(context)
    return {name: value for name, value in context.params.items() if name != "config_file"}


def as_given(name: str, value: Any, in_file: Collection[str]) -> str:
    """Return how messages show an option of the command line or of a file."""
    if name in in_file:
        return f"{name} = {shown(value)} in {FILE}"
    return flag(name) if value is True else f"{flag(name)} {shown(value)}"


def shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else "true" if value is True else str(value)


def test_every_option_is_classified() -> None:
    assert {"dataset", "config_file", *OPTIONS} == {parameter.name for parameter in COMMAND.params}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_applies_to_a_dataset_with_what_it_needs_or_the_error_names_both(name: str, here: Path) -> None:
    value, datasets, needed = OPTIONS[name]
    for dataset, in_file in itertools.product(sorted(EVERY), ((), (name,), ("dataset",), (name, "dataset"))):
        options = {"dataset": dataset, **NEEDED.get(dataset, {}), name: value}
        subject = as_given(name, value, in_file)
        if dataset in datasets:
            assert parse({**options, **needed}, FILE, in_file)["dataset"] == options["dataset"]
            if needed:
                without = f"{subject} has no effect without {flag(next(iter(needed)))}; give both, or leave it out"
                with pytest.raises(ConfigError, match=f"{re.escape(without)}|{re.escape(subject)} applies to --"):
                    parse(options, FILE, in_file)
        elif (name, dataset) not in (("vocabulary", "all"), ("unknown", "all")):  # "applies to one dataset", below
            with pytest.raises(ConfigError) as caught:
                parse(options, FILE, in_file)
            found, _, place = str(caught.value).partition(", not to ")
            assert found.startswith(f"{subject} applies to ")
            of_all = dataset == "expanded" and datasets == DRAWN
            chosen = "--expand ml-1m:2x2" if of_all else as_given("dataset", options["dataset"], in_file)
            assert place == f"{chosen}; leave it out"


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_in_a_file_is_the_same_as_on_the_command_line(name: str, here: Path) -> None:
    value, datasets, needed = OPTIONS[name]
    dataset = next(dataset for dataset in ("synthetic", "custom", "ml-1m") if dataset in datasets)
    options = {"dataset": dataset, **NEEDED.get(dataset, {}), **needed, name: value}
    given = parse(options, FILE, ())
    assert json.loads(json.dumps(given[name], default=str)) == value
    assert parse(options, FILE, options.keys()) == given
    other = REPEATED.get(name, OTHERS.get(type(value), "x"))
    Path("other.toml").write_text(f"{name} = {json.dumps(other)}\n")
    context = COMMAND.make_context("preprocess", [*on_command_line(options), "--config", "other.toml"])
    check_options(context)
    assert context.params | {"config_file": None} == given | {"config_file": None}
    with pytest.raises(ConfigError, match=re.escape(f"log.toml: {name} must be ")):
        parse({name: [[]]}, FILE, (name,))


EXCLUDING: list[tuple[dict[str, Any], str]] = [
    ({"action_columns": NAMES, "action_map": "stars"}, "{1} applies to --action-columns COLUMN, not to {0}"),
    ({"timestamp_unit": "row", "timestamp_column": "t"}, "{1} applies to --timestamp-unit other than row, not to {0}"),
    ({"vocabulary": "old", "ids": "keep"}, "{1} applies to commands without --vocabulary, not to {0}"),
    ({"split": "none", "seed": 0}, "{1} applies to --split user:FRACTION or --dataset synthetic, not to {0}"),
    ({"dataset": "all", "vocabulary": "old"}, "{1} applies to one dataset, not to {0}"),
]


@pytest.mark.parametrize(("options", "message"), EXCLUDING)
def test_options_that_exclude_each_other_are_named_with_their_places(
    here: Path, options: dict[str, Any], message: str
) -> None:
    others = {} if "dataset" in options else {"dataset": "custom", **NEEDED["custom"]}
    for in_file in itertools.chain.from_iterable(itertools.combinations(options, count) for count in range(3)):
        expected = message.format(*(as_given(name, value, in_file) for name, value in options.items()))
        with pytest.raises(ConfigError, match=re.escape(f"{expected}; leave it out")):
            parse({**others, **options}, FILE, in_file)


def test_of_two_options_that_define_the_split_the_one_on_the_command_line_wins(here: Path) -> None:
    options = {"dataset": "ml-1m", "split": "leave-last:1", "eval_fraction": 0.5}
    for in_file, split in (("split", "user:0.5"), ("eval_fraction", "leave-last:1")):
        assert parse(options, FILE, (in_file,))["split"] == split
    for both, texts in (
        ((), "--eval-fraction 0.5 and --split leave-last:1"),
        (("split", "eval_fraction"), "eval_fraction = 0.5 in log.toml and split = leave-last:1 in log.toml"),
    ):
        with pytest.raises(ConfigError, match=f"{texts} both define the split; pass one of them"):
            parse(options, FILE, both)


def test_paths_in_a_file_are_relative_to_its_folder(here: Path) -> None:
    texts = {"out": "out", "split": "file:users,x.txt", "events": ["a.csv", "/b.csv"], "context": "users.csv"}
    options = {"dataset": "custom", **texts, "vocabulary": "../old", "item_features": "items.csv", "label": "file:x"}
    options |= {"context_columns": NAMES, "item_columns": NAMES, "item_vectors": "x.npy"}
    (here / "sub").mkdir()
    values = parse(options, Path("sub", "log.toml"), options)
    assert (values["split"], values["events"]) == ("file:sub/users,x.txt", [Path("sub/a.csv"), Path("/b.csv")])
    assert values["item_features"] == [Path("sub/items.csv")]
    names = ("out", "context", "item_vectors", "vocabulary", "label")  # the label is a column
    assert " ".join(str(values[name]) for name in names) == "sub/out sub/users.csv sub/x.npy sub/../old file:x"
    options = {"dataset": "synthetic", "lengths": "histogram:column=length,path=a", "split": "file:/users.txt"}
    values = parse(options, Path("sub", "log.toml"), options)
    assert (values["lengths"], values["split"]) == ("histogram:column=length,path=sub/a", "file:/users.txt")


def test_names_may_have_commas_one_needs_no_list_and_the_command_line_turns_off_what_a_file_turns_on(
    here: Path,
) -> None:
    options = {"dataset": "custom", "events": "log.csv", "columns": ["price, EUR", " b"], "action_columns": "a,b"}
    values = parse(options, FILE, options)
    assert (values["columns"], values["action_columns"]) == (("price, EUR", " b"), ("a,b",))
    assert values["events"] == [Path("log.csv")]
    arguments = ["--dataset", "custom", "--events", "log.csv", "--columns", "a,b", "--columns", "c"]
    assert COMMAND.make_context("preprocess", arguments).params["columns"] == ("a", "b", "c")
    FILE.write_text("allow_empty = true\noverwrite = true\n")
    arguments = ["--dataset", "ml-1m", "--config", "log.toml", "--no-allow-empty"]
    params = COMMAND.make_context("preprocess", arguments).params
    assert (params["allow_empty"], params["overwrite"]) == (False, True)


@pytest.mark.timeout(60, method="thread")  # a read that waits cannot be interrupted
def test_a_named_pipe_is_refused_instead_of_waited_for(here: Path) -> None:
    os.mkfifo("pipe")
    with pytest.raises(DataError, match="pipe is a named pipe, not a regular file"):
        COMMAND.make_context("preprocess", ["--config", "pipe"])


def test_a_file_can_have_all_options_of_a_run_and_mistakes_name_it(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("uid,item_id,time\n1,10,1420070400\n1,11,1420070401\n")
    (tmp_path / "later.csv").write_text("uid,item_id,time\n1,11,1420070500\n")
    config, options = tmp_path / "log.toml", {"dataset": "custom", "out": "out", "events": "log.csv", "split": "none"}
    options |= {"user_column": "uid", "timestamp_column": "time", "timestamp_unit": "s"}
    config.write_text("".join(f'{name} = "{value}"\n' for name, value in options.items()))
    printed("preprocess", "--config", config)
    assert open_store(tmp_path / "out").columns["timestamp_ms"].tolist() == [1420070400000, 1420070401000]
    text = printed("preprocess", "--config", config, "--events", tmp_path / "later.csv", "--append")
    assert text.splitlines()[-2:] == [
        "added: 1 event, 0 users, 0 items, 1 file, from 2015-01-01T00:01:40Z to 2015-01-01T00:01:40Z",
        f"next: evenrank inspect {tmp_path / 'out'}",
    ]
    run = evenrank("preprocess", "--config", config, "--users", 9)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    message = "--users 9 applies to --dataset synthetic, not to dataset = custom in "
    assert run.stderr.startswith(f"error: {message}{config};")


def test_distributions_and_drift_of_synthetic_data_are_options(tmp_path: Path) -> None:
    command = ["preprocess", "--dataset", "synthetic", "--out", tmp_path / "out", "--users", 50, "--split", "none"]
    options = "--item-exponent 0.5 --actions uniform:low=3,high=3 --contextual a=uniform:high=2 --contextual b=zipf"
    printed(*command, *options.split(), "--drift", "categories=4,days=3")
    manifest = open_store(tmp_path / "out").manifest
    assert (list(manifest.contextual), manifest.vocabulary_sizes["action"]) == (["a", "b"], 4)
    assert manifest.extra_events == {"category": "int64"}
    assert {name: manifest.options[name] for name in ("items", "actions", "contextual", "drift")} == {
        "items": "Zipf(exponent=0.5, low=1, high=50000, shift=0)",
        "actions": "Uniform(low=3, high=3)",
        "contextual": {"a": "Uniform(low=1, high=2)", "b": "Zipf(exponent=1.2, low=1, high=4096, shift=0)"},
        "drift": "Drift(categories=4, days=3.0, share=0.8, new_items=0.3)",
    }


def test_the_rule_of_each_column_of_ids_is_printed_with_both_figures(here: Path) -> None:
    two = "1,1000,0\n2,7,1\n"
    kept, dense = "user_id: kept (2 distinct, largest 2)", "dense (2 distinct, largest {}), numbered 1 to 2 by first ap"
    for events, out, options, *lines in (
        (two, "auto", "", kept, f"item_id: {dense.format('1,000')}pearance"),
        (two, "hash", "--ids item=hash:1,user=dense", f"user_id: {dense.format(2)}pearance",
         "item_id: hash:1 (2 distinct), 2 values share their id with another"),
        ("1,1000,0\n1,8,1\n", "later", "--vocabulary auto", "user_id: kept (largest 1)",
         "item_id: dense (2 distinct, largest 1,000, 1 of them not in the earlier vocabulary), numbered 1 to 3 by "
         "first appearance"),
    ):  # fmt: skip
        (here / f"{out}.csv").write_text(f"user_id,item_id,timestamp\n{events}")
        log = f"preprocess --dataset custom --events {out}.csv --allow-empty --split none --out {out} {options}"
        assert [line for line in printed(*log.split()).splitlines() if line[:8] in ("user_id:", "item_id:")] == lines
