"""Settings come from the command line and a TOML file, and mistakes in them are one line."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evenrank.core.errors import ConfigError
from trainer.config import TrainConfig, read_config, types_of_settings
from trainer.options import command_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


def test_options_override_the_file_and_the_file_the_defaults(toml: Path) -> None:
    toml.write_text("hidden = 32\nheads = 4\nlearning_rate = 1\n")
    config = read_config(toml, {"heads": 8, "layers": None})
    assert config == TrainConfig(hidden=32, heads=8, learning_rate=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden = 32", "has the unknown key 'hiden'; known keys are data, out, model, task"),
        ("hidden = ", "is not TOML"),
        ("hidden = 3.5", "hidden must be of type int, got 3.5"),
        ("hidden = true", "hidden must be of type int, got True"),
        ("codes = 1", "codes must be of type str, got 1"),
        ("learning_rate = nan", "learning_rate must be at least 0, got nan"),
        ("batch_size = 0", "batch_size must be at least 1, got 0"),
        ('model = "sasrec"', "model must be one of hstu, semantic-ids, got 'sasrec'"),
        ("heads = 3", "hidden must be a multiple of heads, got 64 and 3"),
        (
            'routing = "roundrobin"',
            "routing = 'roundrobin' needs embeddings = 'sharded', got 'replicated', where all ranks have all keys; ",
        ),
        ('routing = "modulo"', "routing must be one of continuous, roundrobin, hash_roundrobin, got 'modulo'"),
        ("dropout = 1.0", "dropout must be below 1, got 1.0"),
        ("tensor_parallel = 0", "tensor_parallel must be at least 1, got 0"),
        ("tensor_parallel = 4", "tensor_parallel = 4 cannot divide heads = 2; choose a divisor"),
        (
            'tensor_parallel = 2\nmodel = "semantic-ids"',
            "= 2 works with model = 'hstu' alone, got 'semantic-ids'; choose that, or tensor_parallel = 1",
        ),
        ('tensor_parallel = 2\ntask = "retrieval"', "works with task = 'ranking' alone, got 'retrieval'"),
    ],
)
def test_a_mistake_in_the_file_is_an_error_with_its_value_and_the_file(toml: Path, text: str, message: str) -> None:
    toml.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(toml, {})
    assert message in str(caught.value)
    assert str(toml) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_is_an_error(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"settings.toml cannot be read: No such file or directory; check --config"):
        read_config(toml, {})


def test_every_setting_has_a_default_that_passes_its_own_check_and_a_help() -> None:
    TrainConfig()
    for entry in dataclasses.fields(TrainConfig):
        assert entry.metadata["help"].endswith("."), entry.name


def test_every_setting_is_an_option_with_its_type(toml: Path) -> None:
    toml.write_text("layers = 7")
    examples: dict[Any, tuple[list[str], Any]] = {
        int: (["8"], 8),
        int | None: (["8"], 8),
        float: (["0.25"], 0.25),
        bool: ([], True),
    }
    given = ["--config", str(toml)]
    expected: dict[str, Any] = {"layers": 7}
    for entry in dataclasses.fields(TrainConfig):
        choices = entry.metadata["choices"]
        text, value = examples.get(types_of_settings()[entry.name], (["x"], "x"))
        if choices:
            text, value = [choices[-1]], choices[-1]
        if entry.name in ("layers", "stall_seconds"):
            continue
        if entry.name == "tensor_parallel":  # more of them fit no other model and task
            text, value = ["1"], 1
        given += [f"--{entry.name.replace('_', '-')}", *text]
        expected[entry.name] = value
    seen: list[TrainConfig] = []
    result = CliRunner().invoke(_app(seen), given)
    assert result.exit_code == 0, result.output
    assert seen == [TrainConfig(**expected)]


def _app(seen: list[TrainConfig]) -> Any:
    import typer

    app = typer.Typer()
    app.command()(command_of(seen.append))
    return app


def test_the_settings_that_come_with_the_trainer_are_right() -> None:
    files = sorted((ROOT / "examples" / "trainer" / "configs").glob("*.toml"))
    assert files
    for file in files:
        assert math.isfinite(read_config(file, {}).learning_rate)
