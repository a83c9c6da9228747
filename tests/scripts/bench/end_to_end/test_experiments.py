import dataclasses
from pathlib import Path

import pytest

from end_to_end.experiments import Run, lengths_of, read_experiments
from evenrank.core.errors import ConfigError
from trainer.config import TrainConfig

TABLES = Path(__file__).resolve().parents[4] / "scripts" / "bench" / "experiments"
WORKLOAD = '[workload]\nsteps = 10\nlengths.short = "uniform:low=1,high=9"\nlengths.long = "uniform:low=9,high=90"\n'
SETTINGS = "[settings]\nhidden = 32\n"
BASELINE = '[[run]]\nname = "baseline"\nsettings.balance = "none"\n'
SECOND = '[[run]]\nname = "second"\n'
THIRD = '[[run]]\nname = "third"\n'


RUNS = WORKLOAD + SETTINGS + BASELINE + SECOND


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "table.toml"


def test_a_run_has_the_settings_and_keys_of_the_run_that_it_adds_to(file: Path) -> None:
    def runs_of(*tables: str) -> tuple[Run, ...]:
        file.write_text("".join((WORKLOAD, SETTINGS, BASELINE, *tables)))
        return read_experiments(file).runs

    runs = runs_of(SECOND + "settings.heads = 4\n", THIRD + 'settings.balance = "all-to-all"\n')
    assert [run.adds_to for run in runs] == [None, "baseline", "second"]
    values = [(run.settings.hidden, run.settings.balance, run.settings.heads) for run in runs]
    assert values == [(32, "none", 2), (32, "none", 4), (32, "all-to-all", 4)]
    keys = 'gpus = 2\nlengths = ["long"]\nitem_rows = 7\ncost = "baseline"\n'
    second, third = runs_of(SECOND + keys, THIRD + 'gpus = 1\ncost = "hstu"\n')[1:]
    assert (second.gpus, second.lengths, second.item_rows, second.cost) == (2, ("long",), 7, "baseline")
    assert (third.gpus, third.lengths, third.item_rows, third.cost) == (1, ("long",), 7, "hstu")
    found = [lengths_of(run, read_experiments(file).workload) for run in runs_of(SECOND + keys)]
    assert found == [("short", "long"), ("long",)]
    third = runs_of(SECOND, THIRD + 'adds_to = "none"\nsettings.heads = 4\n')[2]
    assert (third.adds_to, third.settings) == (None, TrainConfig(hidden=32, heads=4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = ", "is not TOML"),
        (WORKLOAD, "has no [[run]]"),
        ("runs = 1\n" + RUNS, "the file has the unknown key 'runs'; did you mean run?"),
        (WORKLOAD + "step = 1\n" + BASELINE, "[workload] has the unknown key 'step'; did you mean steps?"),
        (WORKLOAD + "rounds = 0\n" + BASELINE, "[workload]: Workload: rounds must be at least 1, got 0"),
        (WORKLOAD + "seed = 1.5\n" + BASELINE, "[workload]: Workload: seed must be of type int, got 1.5"),
        (WORKLOAD + "rounds = 11\n" + BASELINE, "steps must be at least rounds, got steps=10 and rounds=11"),
        (WORKLOAD + "item_exponent = nan\n" + BASELINE, "item_exponent must be at least 0, got nan"),
        (WORKLOAD + "user_exponent = -1\n" + BASELINE, "user_exponent must be at least 0, got -1"),
        ('[workload.lengths]\n"A 1" = "zipf"\n' + BASELINE, "'A 1': the name is that of a folder; write it as 'a-1'"),
        ('[workload.lengths]\na = "zpf"\n' + BASELINE, "lengths 'a': unknown distribution 'zpf'"),
        ("[workload.lengths]\na = 1\n" + BASELINE, "lengths 'a' must be a distribution such as"),
        (
            WORKLOAD + "[settings]\nhiden = 1\n" + BASELINE,
            "[settings], settings has the unknown key 'hiden'; did you mean hidden",
        ),
        (WORKLOAD + "[settings]\nhidden = 33\n" + BASELINE, "[settings]: hidden must be a multiple of heads"),
        (WORKLOAD + "[[run]]\ngpus = 1\n", "run 1: name must be text"),
        (WORKLOAD + '[[run]]\nname = "none"\n', "run 1: name must be text with letters or digits, but not 'none'"),
        (RUNS + "gpu = 1", "has the unknown key 'gpu'; did you mean gpus?"),
        (RUNS + 'gpus = "1"', "run 'second': gpus must be of type int, got '1'"),
        (RUNS + "gpus = 0", "run 'second': gpus must be at least 1, got 0"),
        (RUNS + "settings.hiden = 1", "run 'second', settings has the unknown key 'hiden'; did you mean hidden"),
        (RUNS + "settings.heads = 5", "run 'second': hidden must be a multiple of heads, got hidden=32 and heads=5"),
        (RUNS + 'adds_to = "x"', "run 'second': adds_to must be 'none' or a run before it (baseline), got 'x'"),
        (RUNS + 'lengths = ["x"]', "'second': lengths must be names of [workload.lengths] (short, long), got ['x']"),
        (RUNS + 'cost = "x"', "run 'second': cost must be 'hstu' or a run before it (baseline), got 'x'"),
        (RUNS + '[[run]]\nname = "+ Baseline"', "'baseline' has the same name as a file; choose another name"),
        (
            RUNS + 'settings.balance = "all-to-all"\n' + THIRD + 'cost = "second"\n',
            "run 'third': cost is fitted to the times of 'second', which is balanced; name a run with",
        ),
        (
            RUNS + 'lengths = ["short"]\n' + THIRD + 'cost = "second"\nlengths = ["short", "long"]\n',
            "run 'third': cost is fitted to the times of 'second', which does not run with the lengths 'long'",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_place(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_experiments(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hstu_table_measures_every_part_by_itself() -> None:
    """Each run differs from the one that it adds to by the settings that its name says, and no other."""
    runs = {run.name: run for run in read_experiments(TABLES / "hstu.toml").runs}
    settings = {name: dataclasses.asdict(run.settings) for name, run in runs.items()}
    added = {
        name: {key for key, value in settings[name].items() if value != settings[run.adds_to][key]}
        for name, run in runs.items()
        if run.adds_to
    }
    assert (added.pop("measured cost"), runs.pop("measured cost").cost) == (set(), "baseline")
    assert all(len(keys - {"strategy"}) == 1 for keys in added.values())
    assert runs.keys() - added.keys() == {"baseline", "padded"}
