import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from end_to_end.experiments import Experiments, Run, Workload
from end_to_end.reports import cost_section, scaling_section
from end_to_end.reports.report import write_report
from end_to_end.results import EVEN, LIVE, PREPARED, RunResult
from evenrank.core.errors import DataError
from tests.scripts.bench.end_to_end import made_up
from trainer.config import TrainConfig

BALANCED = {"strategy": "lpt-swap"}
SETTINGS = TrainConfig()
EXPERIMENTS = Experiments(
    workload=Workload(lengths={"lognormal": "lognormal:mean=512,std=512", "clipped-zipf": "clipped-zipf:exponent=1.2"}),
    runs=(
        Run(name="baseline", settings=SETTINGS),
        Run(name="lpt-swap", settings=SETTINGS, adds_to="baseline"),
        Run(name="Tensor parallel 2", settings=SETTINGS, lengths=("lognormal",)),
    ),
)


def save(out: Path, *results: RunResult) -> None:
    for result in results:
        (out / result.lengths).mkdir(parents=True, exist_ok=True)
        result.save(out / result.lengths / f"{result.name.lower().replace(' ', '-')}.json")


def measured(lengths: str) -> tuple[RunResult, RunResult]:
    even = [made_up.segment(kind, 0, [10]) for kind in (PREPARED, EVEN)]
    unbalanced, balanced = ([made_up.segment(LIVE, 0, [ms]), *even] for ms in (12.5, 10))
    second = made_up.result("lpt-swap", balanced, lengths=lengths, adds_to="baseline", settings=BALANCED)
    return made_up.result("baseline", unbalanced, lengths=lengths), second


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Replace the sections that other modules write; returns the names of the results that they were given."""
    names: dict[str, list[str]] = {}

    def write(name: str, out: Path, results: Sequence[RunResult]) -> str:
        names[name] = [f"{result.lengths}/{result.name}" for result in results]
        return f"## {name}\n\nfitted\n" if name == "Costs" else ""

    monkeypatch.setattr(cost_section, "write_section", partial(write, "Costs"))
    monkeypatch.setattr(scaling_section, "write_section", partial(write, "Scaling"))
    return names


def test_report_has_all_parts(tmp_path: Path, given: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    reason = "12 times are too few to fit a cost; measure at least 20"
    failed = made_up.result("Tensor parallel 2", failure=reason, settings=BALANCED)
    of_another_table = made_up.result("4 GPUs", measured("lognormal")[0].segments)
    first, second = measured("lognormal")
    first.environment["torch"] = "2.13"
    for result in (first, second):
        result.workload.update(item_exponent=1.05, user_exponent=1.2)
    save(tmp_path, first, second, failed, of_another_table, *measured("clipped-zipf"))
    for other in ("lpt-swap.task.json", "measured_cost-baseline.json"):
        (tmp_path / "lognormal" / other).write_text("{}")

    write_report(tmp_path, EXPERIMENTS)

    text = (tmp_path / "report.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert [title.split()[1] for title in titles] == ["lognormal:", "clipped-zipf:", "Costs", "Columns", "Runs"]
    for title in ("Speed", "Balance", "Ranks", "Targets"):
        assert text.count(f"### {title}\n") == 2
    for line in (
        "## lognormal: `lognormal:mean=512,std=512`",
        "- gpu: H200",
        "- torch: 2.13, 2.11",
        "- items drawn from Zipf with exponent: 1.05",
        "- users drawn from Zipf with exponent: 1.2, 0",  # as in results of before users had one
        f"- Tensor parallel 2 failed: {reason}",
        "| Tensor parallel 2 (failed) | 2 | - | - | - | - | - | - | - | - | - | - |",
        "| lpt-swap: step at most 1.01 of a perfectly even one | 1.0000 | met, 1.00 percentage points to spare |",
        "- lpt-swap (adds to baseline): balance = all-to-all",
    ):
        assert line in text.splitlines()
    pictures = {part.split(")")[0] for part in text.split("](")[1:]}
    assert pictures == {f"plots/{path.name}" for path in (tmp_path / "plots").iterdir()}
    lengths = EXPERIMENTS.workload.lengths
    of_lengths = [f"{name}-{one}" for name in ("throughput", "ranks", "timeline") for one in lengths]
    assert pictures == {f"plots/{name}.png" for name in ("headline", *of_lengths)}
    assert given["Costs"] == [
        *(f"lognormal/{name}" for name in ("baseline", "lpt-swap", "Tensor parallel 2")),
        *(f"clipped-zipf/{name}" for name in ("baseline", "lpt-swap")),
    ]
    assert set(given["Scaling"]) == {*given["Costs"], "lognormal/4 GPUs"}
    output = capsys.readouterr().out
    assert "lognormal: speed\n" in output
    assert any(line.split()[:4] == ["lpt-swap", "2", "1", "10.00"] for line in output.splitlines())
    assert "not measured: lpt-swap: at least as fast as karmarkar-karp\n" in output


def test_runs_without_a_result_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, measured("clipped-zipf")[0])
    missing = Run(name="fast, lpt-swap", settings=SETTINGS)
    write_report(tmp_path, dataclasses.replace(EXPERIMENTS, runs=(*EXPERIMENTS.runs, missing)))
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "Without a result: all runs." in lines
    assert "Without a result: lpt-swap; fast, lpt-swap." in lines  # "Tensor parallel 2" is not made with these lengths
    assert "clipped-zipf: without a result: lpt-swap; fast, lpt-swap" in capsys.readouterr().out
    assert (tmp_path / "plots" / "throughput-clipped-zipf.png").exists()
    assert not (tmp_path / "plots" / "timeline-clipped-zipf.png").exists()
    (tmp_path / "clipped-zipf" / "baseline.json").write_text("{}")
    with pytest.raises(DataError, match=r"baseline\.json cannot be read as"):
        write_report(tmp_path, EXPERIMENTS)
