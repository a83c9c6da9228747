"""The lines of docs/reference/formats.md, as they are there, in each tool that is installed."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evenrank.preprocess import PreprocessConfig, TabularConfig, preprocess

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "formats.md"
BLOCKS = {
    re.match(r"(?:import|from) (\w+)", block).group(1): block  # type: ignore[union-attr]
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
}
POLARS = 'len(rows), events.select("user_id", "value").rows()'
# What each tool says of the variables of its block: the number of rows, and user and raw item of each event.
RESULTS = {
    "polars": POLARS,
    "pandas": 'len(rows), events[["user_id", "value"]].values.tolist()',
    "duckdb": "len(rows), events.fetchall()",
    "pyspark": "rows.count(), [(row.user_id, row.value) for row in events.collect()]",
    "datasets": POLARS,
}
EVENTS = [(1, "red"), (1, "blue"), (2, "red"), (2, "green"), (1, "red")]


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # In another folder, because that of the project has one called `datasets`.
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("tool", RESULTS)
def test_each_tool_reads_the_rows_and_gets_back_raw_ids_by_one_join(tmp_path: Path, tool: str) -> None:
    imported = _run(f"import {tool}", tmp_path)
    if imported.returncode != 0:
        pytest.skip(imported.stderr.strip().splitlines()[-1])
    if tool == "pyspark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    log = tmp_path / "log.csv"
    log.write_text("user_id,item_id,timestamp\n" + "".join(f"{u},{i},{t}\n" for t, (u, i) in enumerate(EVENTS)))
    custom = TabularConfig(events=(log,), user_column="user_id", item_column="item_id", timestamp_column="timestamp")
    preprocess(
        PreprocessConfig(dataset="custom", custom=custom, out=tmp_path / "out/mine", split="none", allow_empty=True)
    )
    run = _run(f"{BLOCKS[tool]}\nprint(({RESULTS[tool]}))", tmp_path)
    assert run.returncode == 0, run.stderr
    num_rows, events = ast.literal_eval(run.stdout.splitlines()[-1])
    assert num_rows == 2
    assert sorted(map(tuple, events)) == sorted(EVENTS)


def test_every_tool_is_tested() -> None:
    assert BLOCKS.keys() == RESULTS.keys()
