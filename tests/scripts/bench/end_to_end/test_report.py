import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from end_to_end import cost_section, scaling_section
from end_to_end.experiments import Experiments, Run, Workload
from end_to_end.reports.report import write_report
from end_to_end.results import EVEN, LIVE, PREPARED, RunResult, Segment
from evenrank.core.errors import DataError
from rendering import figures
from tests.scripts.bench.end_to_end import made_up
from trainer.config import TrainConfig

BALANCED = {"strategy": "lpt-swap"}
SETTINGS = TrainConfig()
EXPERIMENTS = Experiments(
    workload=Workload(
        lengths={"lognormal": "lognormal:mean=512,std=512", "clipped-zipf": "clipped-zipf:exponent=1.2,high=4096"}
    ),
    runs=(
        Run(name="baseline", settings=SETTINGS),
        Run(name="lpt-swap", settings=SETTINGS, adds_to="baseline"),
        Run(name="Tensor parallel 2", settings=SETTINGS, lengths=("lognormal",)),
    ),
)


@pytest.fixture(autouse=True)
def sections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the sections that other modules write; returns the names of the results that they were given."""
    given: list[str] = []

    def write(out: Path, results: Sequence[RunResult]) -> str:
        given.extend(f"{result.lengths}/{result.name}" for result in results)
        return "## Costs\n\nfitted\n"

    monkeypatch.setattr(cost_section, "write_section", write)
    monkeypatch.setattr(scaling_section, "write_section", lambda out, results: "")
    return given


@pytest.fixture
def no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write empty files instead of plots, because drawing takes long."""

    def touch(_figure: Figure, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.touch()

    monkeypatch.setattr(figures, "save", touch)


def save(out: Path, *results: RunResult) -> None:
    for result in results:
        (out / result.lengths).mkdir(parents=True, exist_ok=True)
        result.save(out / result.lengths / f"{result.name.lower().replace(' ', '-')}.json")


def measured(lengths: str) -> tuple[RunResult, RunResult]:
    def segments(live: float) -> list[Segment]:
        return [made_up.segment(kind, 0, [ms]) for kind, ms in ((LIVE, live), (PREPARED, 10), (EVEN, 10))]

    return (
        made_up.result("baseline", segments(12.5), lengths=lengths),
        made_up.result("lpt-swap", segments(10), lengths=lengths, adds_to="baseline", settings=BALANCED),
    )


def test_report_has_tables_targets_plots_and_conditions(tmp_path: Path, sections: list[str]) -> None:
    failed = made_up.result("Tensor parallel 2", failure="out of memory", settings=BALANCED)
    save(tmp_path, *measured("lognormal"), failed, *measured("clipped-zipf"))

    write_report(tmp_path, EXPERIMENTS)

    text = (tmp_path / "report.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("#")]
    of_table = ["### Speed", "### Balance", "### Ranks", "### Targets"]
    assert titles == [
        "# Training benchmark",
        "## lognormal: `lognormal:mean=512,std=512`",
        *of_table,
        "## clipped-zipf: `clipped-zipf:exponent=1.2,high=4096`",
        *of_table,
        "## Costs",
        "## Columns",
        "## Runs",
    ]
    for line in (
        "- gpu: H200",
        "- torch: 2.11",
        "| Tensor parallel 2 (failed: out of memory) | 2 | - | - | - | - | - | - | - | - | - | - |",
        "| lpt-swap: step at most 1.01 of a perfectly even one | 1.0000 | met, 1.00 percentage points to spare |",
        "- lpt-swap (adds to baseline): balance = all-to-all",
    ):
        assert line in text.splitlines()
    pictures = {part.split(")")[0] for part in text.split("](")[1:]}
    assert pictures == {f"plots/{path.name}" for path in (tmp_path / "plots").iterdir()}
    of_lengths = ("throughput", "ranks", "timeline")
    assert pictures == {"plots/headline.png"} | {
        f"plots/{name}-{lengths}.png" for name in of_lengths for lengths in ("lognormal", "clipped-zipf")
    }
    assert sections == [
        "lognormal/baseline",
        "lognormal/lpt-swap",
        "lognormal/Tensor parallel 2",
        "clipped-zipf/baseline",
        "clipped-zipf/lpt-swap",
    ]


@pytest.mark.usefixtures("no_pixels")
def test_runs_without_a_result_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, measured("clipped-zipf")[0])

    write_report(tmp_path, EXPERIMENTS)

    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "Without a result: all runs." in lines
    assert "Without a result: lpt-swap." in lines  # "Tensor parallel 2" is not made with these lengths
    assert "clipped-zipf: without a result: lpt-swap" in capsys.readouterr().out
    assert (tmp_path / "plots" / "throughput-clipped-zipf.png").exists()
    assert not (tmp_path / "plots" / "timeline-clipped-zipf.png").exists()


@pytest.mark.usefixtures("no_pixels")
def test_tables_and_verdicts_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, *measured("lognormal"))

    write_report(tmp_path, EXPERIMENTS)

    output = capsys.readouterr().out
    assert "lognormal: speed\n" in output
    assert any(line.split()[:4] == ["lpt-swap", "2", "1", "10.00"] for line in output.splitlines())
    assert (
        "met, 0.50 percentage points to spare: lpt-swap: balancing exposes at most 0.5 % of a step (0.00 %)" in output
    )
    assert "not measured: lpt-swap: at least as fast as karmarkar-karp\n" in output


def test_a_report_without_any_result_says_so(tmp_path: Path) -> None:
    write_report(tmp_path, EXPERIMENTS)

    assert (tmp_path / "report.md").read_text().count("Without a result: all runs.") == 2


@pytest.mark.usefixtures("no_pixels")
def test_names_of_missing_runs_may_have_commas(tmp_path: Path) -> None:
    save(tmp_path, *measured("lognormal"))
    missing = [Run(name=name, settings=SETTINGS) for name in ("fast, lpt-swap", "padded")]

    write_report(tmp_path, dataclasses.replace(EXPERIMENTS, runs=(*EXPERIMENTS.runs[:2], *missing)))

    assert "Without a result: fast, lpt-swap; padded." in (tmp_path / "report.md").read_text().splitlines()


@pytest.mark.usefixtures("no_pixels")
def test_scaling_also_gets_the_results_of_other_tables_in_the_folder(
    tmp_path: Path, sections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, *measured("lognormal"), made_up.result("4 GPUs", measured("lognormal")[0].segments))
    for other in ("lpt-swap.task.json", "measured_cost-baseline.json"):
        (tmp_path / "lognormal" / other).write_text("{}")
    scaled: list[str] = []

    def write(out: Path, results: Sequence[RunResult]) -> str:
        scaled.extend(result.name for result in results)
        return ""

    monkeypatch.setattr(scaling_section, "write_section", write)

    write_report(tmp_path, EXPERIMENTS)

    assert scaled == ["baseline", "lpt-swap", "4 GPUs"]
    assert sections == ["lognormal/baseline", "lognormal/lpt-swap"]


@pytest.mark.usefixtures("no_pixels")
def test_values_that_differ_between_runs_are_side_by_side(tmp_path: Path) -> None:
    first, second = measured("lognormal")
    first.environment["torch"] = "2.13"
    save(tmp_path, first, second)

    write_report(tmp_path, EXPERIMENTS)

    assert "- torch: 2.13, 2.11" in (tmp_path / "report.md").read_text().splitlines()


def test_a_damaged_result_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, *measured("lognormal"))
    (tmp_path / "lognormal" / "baseline.json").write_text("{}")

    with pytest.raises(DataError, match=r"baseline\.json cannot be read as"):
        write_report(tmp_path, EXPERIMENTS)


def test_long_reasons_stand_before_the_tables(tmp_path: Path, sections: list[str]) -> None:
    reason = "12 steps are too few to fit a cost; time at least 20"
    save(tmp_path, *measured("lognormal"), made_up.result("Tensor parallel 2", failure=reason, settings=BALANCED))
    write_report(tmp_path, EXPERIMENTS)
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert f"- Tensor parallel 2 failed: {reason}" in lines
    assert "| Tensor parallel 2 (failed) | 2 | - | - | - | - | - | - | - | - | - | - |" in lines
