"""Each run of a file has the settings of the run that it adds to, and mistakes are one line."""

from pathlib import Path

import pytest

from end_to_end.experiments import Experiments, Run, lengths_of, read_experiments, slug
from evenrank.core.errors import ConfigError
from trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[4]
WORKLOAD = '[workload]\nsteps = 10\nlengths.short = "uniform:low=1,high=9"\nlengths.long = "uniform:low=9,high=90"\n'
SETTINGS = "[settings]\nhidden = 32\n"
BASELINE = '[[run]]\nname = "baseline"\nsettings.balance = "none"\n'
SECOND = '[[run]]\nname = "second"\n'
THIRD = '[[run]]\nname = "third"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "table.toml"


def runs_of(file: Path, *tables: str) -> tuple[Run, ...]:
    file.write_text("".join((WORKLOAD, SETTINGS, BASELINE, *tables)))
    return read_experiments(file).runs


def test_a_run_has_the_settings_and_keys_of_the_run_that_it_adds_to(file: Path) -> None:
    runs = runs_of(file, SECOND + "settings.heads = 4\n", THIRD + 'settings.balance = "all-to-all"\n')
    assert [run.adds_to for run in runs] == [None, "baseline", "second"]
    assert runs[0].settings == TrainConfig(hidden=32, balance="none")
    assert runs[1].settings == TrainConfig(hidden=32, balance="none", heads=4)
    assert runs[2].settings == TrainConfig(hidden=32, balance="all-to-all", heads=4)
    keys = 'gpus = 2\nlengths = ["long"]\nitem_rows = 7\ncost = "baseline"\n'
    second, third = runs_of(file, SECOND + keys, THIRD + 'gpus = 1\ncost = "hstu"\n')[1:]
    assert (second.gpus, second.lengths, second.item_rows, second.cost) == (2, ("long",), 7, "baseline")
    assert (third.gpus, third.lengths, third.item_rows, third.cost) == (1, ("long",), 7, "hstu")
    third = runs_of(file, SECOND, THIRD + 'adds_to = "none"\nsettings.heads = 4\n')[2]
    assert (third.adds_to, third.settings) == (None, TrainConfig(hidden=32, heads=4))


def test_a_run_is_made_for_all_lengths_unless_it_names_some(file: Path) -> None:
    file.write_text(WORKLOAD + BASELINE + SECOND + 'lengths = ["long"]\n')
    experiments = read_experiments(file)
    assert [lengths_of(run, experiments.workload) for run in experiments.runs] == [("short", "long"), ("long",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = ", "is not TOML"),
        (WORKLOAD, "has no [[run]]"),
        ("runs = 1\n" + WORKLOAD + BASELINE, "the file: unknown key 'runs'; known keys are workload, settings, run"),
        (WORKLOAD + "step = 1\n" + BASELINE, "[workload]: unknown key 'step'; known keys are lengths, item_rows"),
        (WORKLOAD + "rounds = 0\n" + BASELINE, "[workload]: rounds must be a whole number of at least 1, got 0"),
        (WORKLOAD + "seed = 1.5\n" + BASELINE, "[workload]: seed must be a whole number of at least 0, got 1.5"),
        (
            WORKLOAD + "rounds = 11\n" + BASELINE,
            "[workload]: steps must be at least rounds, got steps=10 and rounds=11",
        ),
        (WORKLOAD + "item_exponent = nan\n" + BASELINE, "item_exponent must be a number of at least 0, got nan"),
        (
            '[workload.lengths]\n"A 1" = "zipf"\n' + BASELINE,
            "lengths 'A 1': the name is that of a folder; write it as 'a-1'",
        ),
        ('[workload.lengths]\na = "zpf"\n' + BASELINE, "lengths 'a': unknown distribution 'zpf'"),
        ("[workload.lengths]\na = 1\n" + BASELINE, "lengths 'a' must be a distribution such as"),
        (WORKLOAD + "[settings]\nhiden = 1\n" + BASELINE, "[settings], settings: unknown key 'hiden'"),
        (WORKLOAD + "[settings]\nhidden = 33\n" + BASELINE, "[settings]: hidden must be a multiple of heads"),
        (WORKLOAD + "[[run]]\ngpus = 1\n", "run 1: name must be text"),
        (WORKLOAD + '[[run]]\nname = "none"\n', "run 1: name must be text with letters or digits, but not 'none'"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    check_error(file, message)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("gpu = 1", "unknown key 'gpu'; known keys are name, adds_to"),
        ('gpus = "1"', "run 'second': gpus must be of type int, got '1'"),
        ("settings.hiden = 1", "run 'second', settings: unknown key 'hiden'; known keys are model, task"),
        ("settings.heads = 5", "run 'second': hidden must be a multiple of heads, got hidden=32 and heads=5"),
        ('adds_to = "third"', "run 'second': adds_to must be 'none' or a run before it (baseline), got 'third'"),
        ('lengths = ["shrt"]', "run 'second': lengths must be names of [workload.lengths] (short, long), got ['shrt']"),
        ('cost = "third"', "run 'second': cost must be 'hstu' or a run before it (baseline), got 'third'"),
    ],
)
def test_a_mistake_in_a_run_is_one_line_with_its_name(file: Path, keys: str, message: str) -> None:
    file.write_text(WORKLOAD + SETTINGS + BASELINE + SECOND + keys + "\n" + THIRD)
    check_error(file, message)


@pytest.mark.parametrize(
    ("baseline", "others", "message"),
    [
        (
            BASELINE,
            '[[run]]\nname = "+ Baseline"\n',
            "run '+ Baseline': 'baseline' has the same name as a file; choose another name",
        ),
        (
            BASELINE,
            SECOND + 'settings.balance = "all-to-all"\n' + THIRD + 'cost = "second"\n',
            "run 'third': cost is fitted to the times of 'second', which is balanced; name a run with",
        ),
        (
            BASELINE.replace("settings", 'lengths = ["short"]\nsettings'),
            SECOND + 'cost = "baseline"\nlengths = ["short", "long"]\n',
            "run 'second': cost is fitted to the times of 'baseline', which does not run with the lengths 'long'",
        ),
    ],
)
def test_runs_that_do_not_fit_together_are_one_line(file: Path, baseline: str, others: str, message: str) -> None:
    file.write_text(WORKLOAD + baseline + others)
    check_error(file, message)


def check_error(file: Path, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_experiments(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def shipped(name: str) -> Experiments:
    return read_experiments(ROOT / f"scripts/bench/experiments/{name}.toml")


def test_the_hstu_table_measures_every_part_by_itself() -> None:
    """Each run differs from the one that it adds to by the settings that its name says, and no other."""
    experiments = shipped("hstu")
    by_name = {run.name: run for run in experiments.runs}
    added = {}
    for run in experiments.runs:
        if run.adds_to:
            ours, theirs = run.settings, by_name[run.adds_to].settings
            added[run.name] = {
                key for key in TrainConfig.__dataclass_fields__ if getattr(ours, key) != getattr(theirs, key)
            }
    assert added == {
        "karmarkar-karp": {"balance", "strategy"},
        "lpt-swap": {"balance"},
        "min-move": {"balance", "strategy"},
        "measured cost": set(),
        "recompute": {"recompute"},
        "tensor parallel 2": {"tensor_parallel"},
        "prefetching pipeline": {"pipeline"},
        "overlapped lookups": {"min_sharded_rows"},
        "tables in host memory": {"pipeline"},
        "hashed keys": {"routing"},
    }
    assert {run.name for run in experiments.runs if run.adds_to is None} == {"baseline", "padded"}
    assert by_name["measured cost"].cost == "baseline"
    assert set(experiments.workload.lengths) == {"lognormal", "clipped-zipf"}


def test_the_other_tables_have_the_runs_that_they_are_for() -> None:
    assert [(run.gpus, run.settings.balance) for run in shipped("scaling").runs] == [
        (gpus, balance) for gpus in (1, 2, 4) for balance in ("none", "all-to-all")
    ]
    for run in shipped("smoke").runs:  # needs no GPU
        assert (run.gpus, run.settings.attention, run.settings.pipeline) == (2, "padded", "none")


@pytest.mark.parametrize(
    ("name", "file_name"), [("fast, lpt-swap", "fast-lpt-swap"), ("+ KK  (8)", "kk-8"), ("a/../b", "a-b"), ("+", "")]
)
def test_the_name_of_a_file_has_only_letters_digits_and_hyphens(name: str, file_name: str) -> None:
    assert slug(name) == file_name
