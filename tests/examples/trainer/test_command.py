import dataclasses
import math
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from evenrank.core.errors import EvenrankError
from tests.examples.trainer.jobs import read_config
from trainer.command import OPTIONS, command_of
from trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden = 32", "has the unknown key 'hiden'; did you mean hidden"),
        ("xyz = 32", "has the unknown key 'xyz'; known keys are data, out, model, task"),
        ("hidden = ", "is not valid TOML"),
        ("hidden = true", "hidden must be an integer, got True"),
        ("learning_rate = nan", "learning_rate must be at least 0, got nan"),
        ("batch_size = 0", "batch_size must be at least 1, got 0"),
        ("eval_steps = 0", "eval_steps must be at least 1, got 0"),
        ("heads = 3", "hidden must be a multiple of heads, got hidden=64 and heads=3"),
        ('routing = "modulo"', "routing must be one of continuous, roundrobin, hash_roundrobin, got 'modulo'"),
        ("dropout = 1.0", "dropout must be at least 0 and below 1, got 1.0"),
        ("tensor_parallel = 4", "tensor_parallel = 4 cannot divide heads = 2; choose a divisor"),
        ("max_unallocated = 1.5", "max_unallocated must be at least 0 and at most 1, got 1.5"),
        ("compare_every = 1", "compare_every must be at least 2, got 1"),
        *[
            (f'profile = "{text}"', f"profile must be START:STOP, steps from 0 on, such as 100:110, got {text!r}")
            for text in ("7", "7:7", "8:7", "-1:7", "a:b", "1:2:3", "", "1:" + "9" * 30)
        ],
        ("k = 7", "settings.toml applies to --task retrieval or --model semantic-ids, not to --task ranking; leave it"),
    ],
)
def test_a_mistake_in_the_file_is_an_error_with_its_value_and_the_file(toml: Path, text: str, message: str) -> None:
    toml.write_text(text)
    with pytest.raises(EvenrankError) as caught:
        read_config(toml, {})
    assert message in str(caught.value)
    assert str(toml) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_setting_is_an_option_with_its_type_which_overrides_the_file_and_that_the_defaults(toml: Path) -> None:
    toml.write_text("hidden = 32\nheads = 4\nlearning_rate = 1\n")
    seen: list[TrainConfig] = []
    app = typer.Typer()
    app.command()(command_of(seen.append))
    given = "--profile 5:7 --heads 8 --max-steps 3 --dropout 0.25 --tensorboard --attention padded --precision fp32"
    result = CliRunner().invoke(app, ["--config", str(toml), *given.split()])
    assert result.exit_code == 0, result.output
    options = {
        "profile": "5:7",
        "heads": 8,
        "max_steps": 3,
        "dropout": 0.25,
        "tensorboard": True,
        "attention": "padded",
    }
    assert seen == [TrainConfig(hidden=32, learning_rate=1, precision="fp32", **options)]  # type: ignore[arg-type]
    assert seen[0].profile_window == (5, 7)
    assert OPTIONS.keys() == {entry.name for entry in dataclasses.fields(TrainConfig)}


def test_the_settings_that_come_with_the_trainer_are_right() -> None:
    files = sorted((ROOT / "examples" / "trainer" / "configs").glob("*.toml"))
    assert files
    for file in files:
        assert math.isfinite(read_config(file, {}).learning_rate)
