import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenrank.core.errors import DataError
from evenrank.datasets import open_store
from tests.cli.programs import evenrank, printed
from tests.s3_server import BUCKET, S3, SECRET, run_s3


@pytest.fixture
def url(small_dataset: Path, s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """URL of a dataset, with credentials."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("train", "eval", "manifest.json"):
        s3.put(small_dataset / name, f"commands/{name}")
    return s3.url("commands")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server that denies everything."""
    with run_s3(tmp_path_factory.mktemp("locked"), checks_credentials=True) as server:
        yield server


def test_commands_read_a_dataset_at_a_url_and_print_no_credentials(
    url: str, here: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed("simulate", url, "--split", "eval", "--ranks", 2, "--steps", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    inspected = printed("inspect", f"s3://key:{SECRET}@{BUCKET}/commands?region=us-east-1")
    assert inspected.startswith(f"s3://{BUCKET}/commands: ")
    assert f"s3://{BUCKET}/commands" in text
    assert SECRET not in text + inspected + (here / "commands-report.html").read_text()
    refused = evenrank("inspect", url, "--html", url)
    assert refused.returncode == 2
    assert "is a URL; --html needs the name of a file" in refused.stderr


def test_a_log_becomes_a_dataset_at_a_url_by_options_or_a_file(s3: S3, here: Path) -> None:
    rows = "".join(f"{n % 7},{n},{10**9 + n}\n" for n in range(40))
    (here / "log.csv").write_text(f"user_id,item_id,timestamp\n{rows}")
    s3.put(here / "log.csv", "raw/log.csv")
    out, log = s3.url("made"), s3.url("raw/*.csv")
    (here / "log.toml").write_text(f'dataset = "custom"\nevents = ["{log}"]\nout = "{out}"\nsplit = "none"\n')
    text = printed("preprocess", "--config", here / "log.toml")
    rest = "  # with the options and credentials of --out"  # which are not printed
    assert text.splitlines()[-1] == f"next: evenrank inspect s3://{BUCKET}/made{rest}"
    assert SECRET not in text
    options = ("--dataset", "custom", "--events", log, "--split", "none")
    assert SECRET not in printed("preprocess", *options, "--out", here / "local")
    assert s3.read("made/manifest.json") == (here / "local" / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        *("inspect URL", "simulate URL --ranks 2", "preprocess --dataset synthetic --users 9 --out URL"),
        *("preprocess --dataset custom --events URL --out out", "preprocess --dataset ml-1m --raw-dir URL --out out"),
    ],
)
def test_wrong_credentials_give_one_line_without_them(command: str, here: Path, locked: S3) -> None:
    run = evenrank(*command.replace("URL", locked.url("data")).split())
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert f"s3://{BUCKET}/data" in run.stderr
    assert SECRET not in run.stderr
    assert list(here.iterdir()) == []


def test_an_uncaught_error_shows_no_credentials_either(locked: S3) -> None:
    with pytest.raises(DataError, match=r"s3://histories/data/manifest\.json cannot be read: ") as caught:
        open_store(locked.url("data"))
    assert SECRET not in "".join(traceback.format_exception(caught.value))
