"""Settings come from the command line and a TOML file, and mistakes in them are one line."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from evenrank.core.errors import ConfigError
from trainer.config import TrainConfig, command_of, read_config, types_of_settings

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
        ("heads = 3", "hidden must be a multiple of heads, got hidden=64 and heads=3"),
        ('routing = "modulo"', "routing must be one of continuous, roundrobin, hash_roundrobin, got 'modulo'"),
        ("dropout = 1.0", "dropout must be below 1, got 1.0"),
        ("tensor_parallel = 0", "tensor_parallel must be at least 1, got 0"),
        ("tensor_parallel = 4", "tensor_parallel = 4 cannot divide heads = 2; choose a divisor"),
        (
            'num_negatives = 7\nmodel = "semantic-ids"',
            "--num-negatives applies to --task retrieval, not to --model semantic-ids; leave it out (settings are from",
        ),
    ],
)
def test_a_mistake_in_the_file_is_an_error_with_its_value_and_the_file(toml: Path, text: str, message: str) -> None:
    toml.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(toml, {})
    assert message in str(caught.value)
    assert str(toml) in str(caught.value)
    assert "\n" not in str(caught.value)


SEMANTIC_IDS = {"model": "semantic-ids"}
RETRIEVAL = {"task": "retrieval"}


@pytest.mark.parametrize(
    ("mode", "given", "message"),
    [
        (SEMANTIC_IDS, "task", "--task applies to --model hstu, not to --model semantic-ids"),
        ({"num_tasks": 2}, "positive_action", "--positive-action applies to --num-tasks 1, not to --num-tasks 2"),
        (RETRIEVAL, "positive_action", "--positive-action applies to --num-tasks 1, not to --task retrieval"),
        ({}, "num_negatives", "--num-negatives applies to --task retrieval, not to --task ranking"),
        ({}, "code_levels", "--code-levels applies to a job without --codes, not to --model hstu"),
        (
            {**SEMANTIC_IDS, "codes": "x.pt"},
            "codebook_size",
            "--codebook-size applies to a job without --codes, not to --codes x.pt",
        ),
        ({"balance": "none"}, "strategy", "--strategy applies to --balance other than none, not to --balance none"),
        ({}, "window", "--window applies to --balance no-exchange, not to --balance all-to-all"),
        (SEMANTIC_IDS, "embeddings", "--embeddings applies to --model hstu, not to --model semantic-ids"),
        ({}, "min_sharded_rows", "--min-sharded-rows applies to --embeddings sharded, not to --embeddings replicated"),
        (SEMANTIC_IDS, "routing", "--routing applies to --embeddings sharded, not to --model semantic-ids"),
        (SEMANTIC_IDS, "tensor_parallel", "--tensor-parallel applies to --task ranking, not to --model semantic-ids"),
        ({}, "k", "--k applies to --task retrieval or --model semantic-ids, not to --task ranking"),
    ],
)
def test_an_option_that_would_be_ignored_is_an_error_even_with_its_default(
    mode: dict[str, Any], given: str, message: str
) -> None:
    config = read_config(None, mode)
    with pytest.raises(ConfigError) as caught:
        read_config(None, {**mode, given: getattr(config, given)})
    assert message in str(caught.value)
    assert str(caught.value).endswith("; leave it out")


def test_a_missing_file_or_codes_of_another_model_are_an_error_before_anything_is_read(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"settings.toml cannot be read: No such file or directory; check --config"):
        read_config(toml, {})
    with pytest.raises(ConfigError, match="--codes applies to --model semantic-ids, not to --model hstu; leave it ou"):
        TrainConfig(codes="missing.pt")


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
    seen: list[TrainConfig] = []
    tried = {"layers", "stall_seconds"}
    # No job has all of them.
    modes: list[dict[str, Any]] = [
        {"model": "hstu", "task": "ranking", "embeddings": "sharded", "balance": "no-exchange"},
        {**RETRIEVAL, "balance": "all-gather"},
        {**SEMANTIC_IDS, "codes": "x"},
        SEMANTIC_IDS,
    ]
    for mode in modes:
        expected: dict[str, Any] = {"layers": 7, **mode}
        given = ["--config", str(toml), *(text for name, value in mode.items() for text in (f"--{name}", value))]
        for entry in dataclasses.fields(TrainConfig):
            if entry.name in expected or entry.name in tried:
                continue
            choices = entry.metadata["choices"]
            text, value = examples.get(types_of_settings()[entry.name], (["x"], "x"))
            if choices:
                text, value = [choices[-1]], choices[-1]
            if entry.name in ("tensor_parallel", "num_tasks"):  # more of them fit no other heads, and no threshold
                text, value = ["1"], 1
            try:
                TrainConfig(**mode).check_that_apply([entry.name])
            except ConfigError:
                continue
            given += [f"--{entry.name.replace('_', '-')}", *text]
            expected[entry.name] = value
        tried |= expected.keys()
        app = typer.Typer()
        app.command()(command_of(seen.append))
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 0, result.output
        assert seen[-1] == TrainConfig(**expected)
    assert tried == types_of_settings().keys()


def test_the_settings_that_come_with_the_trainer_are_right() -> None:
    files = sorted((ROOT / "examples" / "trainer" / "configs").glob("*.toml"))
    assert files
    for file in files:
        assert math.isfinite(read_config(file, {}).learning_rate)
