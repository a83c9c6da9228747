import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from evenrank.core.errors import ConfigError, DataError
from evenrank.core.settings import check_use, help_texts, rules_of
from tests.examples.trainer.jobs import read_config
from trainer.config import TrainConfig

NAMES = {entry.name for entry in dataclasses.fields(TrainConfig)}


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


SEMANTIC_IDS = {"model": "semantic-ids"}
CODES = {**SEMANTIC_IDS, "codes": "x.pt"}
RETRIEVAL = {"task": "retrieval"}
WINDOWS = {"time_windows": "1d"}


@pytest.mark.parametrize(
    ("mode", "given", "message"),
    [
        (SEMANTIC_IDS, "task", "--task ranking applies to --model hstu, not to --model semantic-ids"),
        (RETRIEVAL, "positive_action", "--positive-action 1 applies to --num-tasks 1, not to --task retrieval"),
        ({}, "num_negatives", "--num-negatives 128 applies to --task retrieval, not to --task ranking"),
        ({}, "code_levels", "--code-levels 3 applies to commands without --codes, not to --model hstu"),
        (CODES, "codebook_size", "--codebook-size 64 applies to commands without --codes, not to --codes x.pt"),
        (WINDOWS, "epochs", "--epochs 1 applies to commands without --time-windows, not to --time-windows 1d"),
        (
            {"balance": "none"},
            "strategy",
            "--strategy lpt-swap applies to --balance other than none, not to --balance",
        ),
        ({"balance": "none"}, "window", "--window 1 applies to --balance no-exchange, not to --balance none"),
        ({"balance": "all-to-all"}, "window", "applies to --balance no-exchange, not to --balance all-to-all"),
        (SEMANTIC_IDS, "routing", "--routing continuous applies to --embeddings sharded, not to --model semantic-ids"),
        (SEMANTIC_IDS, "tensor_parallel", "--tensor-parallel 1 applies to --model hstu, not to --model semantic-ids"),
    ],
)
def test_an_option_that_would_be_ignored_is_an_error(mode: dict[str, Any], given: str, message: str) -> None:
    config = read_config(None, mode)
    with pytest.raises(ConfigError) as caught:
        read_config(None, {**mode, given: getattr(config, given)})
    assert message in str(caught.value)
    assert str(caught.value).endswith("; leave it out")


HSTU_ONLY = {"task", "attention", "fused_norms", "recompute", "embedding_dim", "embeddings", "tensor_parallel"}
SHARDED_ONLY = {"min_sharded_rows", "routing", "embedding_learning_rate"}
RANKING_ONLY = {"positive_action", "num_tasks", "max_num_candidates"}
CODES_ONLY = {"codes", "code_levels", "codebook_size"}
# The settings that a model does not use, whatever the others are. All others are of any model.
UNUSED = {
    "ranking": {*CODES_ONLY, "num_negatives", "k"},
    "retrieval": {*CODES_ONLY, *RANKING_ONLY},
    "semantic-ids": {*HSTU_ONLY, *SHARDED_ONLY, *RANKING_ONLY, "num_negatives"},
}
COMMON = {
    *("data", "out", "model", "user_id", "max_history_length", "balance", "strategy", "tolerance", "cost", "window"),
    *("max_tokens_per_rank", "batch_size", "num_workers", "hidden", "heads", "layers", "dropout", "pipeline"),
    *("precision", "epochs", "max_steps", "learning_rate", "warmup_steps", "weight_decay", "seed", "eval_every"),
    *("checkpoint_every", "keep", "log_every", "tensorboard", "track_attention", "stall_seconds", "compare_every"),
    *("refit_every", "log_loads", "profile", "min_free_gib", "max_unallocated"),
    *("eval_steps", "time_windows", "time_windows_start"),
}
CHOSEN = {"ranking": ("task", "ranking"), "retrieval": ("task", "retrieval"), "semantic-ids": ("model", "semantic-ids")}
VALUES = {
    "codes": "x.npy",
    "profile": "5:7",
    "data": "data",
    "cost": "cost.json",
    "embeddings": "sharded",
    "time_windows": "1d",
    "time_windows_start": "2015-01-06",
}


@pytest.mark.parametrize("model", UNUSED)
def test_an_option_applies_to_a_model_or_the_error_names_both_with_their_places(toml: Path, model: str) -> None:
    assert COMMON.isdisjoint(set[str]().union(*UNUSED.values()))
    assert COMMON.union(*UNUSED.values()) == NAMES
    chosen, value = CHOSEN[model]
    needed = {name: {"embeddings": "sharded"} for name in SHARDED_ONLY} | {"time_windows_start": WINDOWS}
    for name in NAMES - {"model"}:
        default = getattr(TrainConfig(), name)
        given = VALUES.get(name, 3 if default is None else default)
        for in_file in ({name}, {chosen}, {name, chosen}, set[str]()):
            settings = {**(needed.get(name, {}) if name not in UNUSED[model] else {}), name: given, chosen: value}
            toml.write_text("".join(f"{key} = {json.dumps(settings[key])}\n" for key in sorted(in_file)))
            options = {key: settings[key] for key in settings if key not in in_file}
            if name not in UNUSED[model]:
                assert getattr(read_config(toml, options), chosen) == value
                continue
            with pytest.raises(ConfigError) as caught:
                read_config(toml, options)
            subject, _, place = str(caught.value).partition(", not to ")
            shown = f"{given:g}" if isinstance(given, float) else str(given)
            option = f"--{name.replace('_', '-')}" + f" {shown}" * (not isinstance(given, bool))
            shown = shown.lower() if isinstance(given, bool) else shown
            assert subject.startswith(
                f"{name} = {shown} in {toml} applies to " if name in in_file else f"{option} applies to "
            )
            # Codes of HSTU are excluded by its model, which is the default.
            by = f"{chosen} = {value} in {toml}" if chosen in in_file else f"--{chosen} {value}"
            assert place == f"{'--model hstu' if name in CODES_ONLY else by}; leave it out"


def test_a_missing_file_or_codes_of_another_model_are_an_error_before_anything_is_read(toml: Path) -> None:
    with pytest.raises(DataError, match=r"settings.toml cannot be read: No such file or directory"):
        read_config(toml, {})
    with pytest.raises(ConfigError, match=r"codes='missing\.pt' applies to model='semantic-ids', not to model='hstu'"):
        TrainConfig(codes="missing.pt")


def test_ranks_that_train_on_equal_batches_fit_no_cost() -> None:
    with pytest.raises(
        ConfigError, match="refit_every = 5 would fit another cost to the times of each of tensor_parall"
    ):
        TrainConfig(refit_every=5, tensor_parallel=2)


def test_steps_can_only_be_compared_with_balanced_ones() -> None:
    with pytest.raises(ConfigError, match="compare_every=5 applies to options other than balance='none', not to"):
        TrainConfig(balance="none", compare_every=5)


def test_windows_have_a_begin_only_if_there_are_any() -> None:
    with pytest.raises(
        ConfigError, match="time_windows_start='2015-01-06' applies to time_windows, not to time_windows=None"
    ):
        TrainConfig(time_windows_start="2015-01-06")


def test_every_setting_applies_to_some_job_and_has_a_help() -> None:
    usable = set()
    for mode in ({}, {"embeddings": "sharded"}, RETRIEVAL, SEMANTIC_IDS, CODES, WINDOWS):
        config = read_config(None, mode)
        for name in NAMES:
            with contextlib.suppress(ConfigError):
                check_use(rules_of(TrainConfig), dataclasses.asdict(config), [name])
                usable.add(name)
    assert usable == NAMES
    assert help_texts(TrainConfig).keys() == NAMES
    assert all(text.endswith(".") for text in help_texts(TrainConfig).values())
