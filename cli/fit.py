"""`evenrank fit`: the cost of a sample from the log of a run, whose steps were timed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenrank.cli import console
from evenrank.cli.options import Json, file_option
from evenrank.core.errors import DataError

if TYPE_CHECKING:
    from evenrank.dataloader.balance.metrics.log import BalanceLog


def fit_command(
    log: Annotated[
        Path, typer.Argument(help="Log of a run with a StepTimer.", metavar="FILE.jsonl", show_default=False)
    ],
    out: Annotated[Path | None, file_option(help="File of the cost. Default: FILE-cost.json, next to the log.")] = None,
    as_json: Json = False,
) -> None:
    """Fit the cost of a sample to the measured steps of a run, and save it.

    The run needs a StepTimer, and its log counts with one step per record. These should not all be balanced, because
    balanced ones are too similar: strategy="none", or compare_every=2. The cost is for
    BalanceConfig(cost=MeasuredCost.load(FILE)), and for:

    \b
        evenrank fit out/balance.jsonl --out out/cost.json
        evenrank simulate out/balance.jsonl --cost out/cost.json
    """
    import numpy as np

    from evenrank.dataloader.balance import MeasuredCost
    from evenrank.dataloader.balance.metrics.log import read_json_lines

    with console.stages() as on_stage:
        on_stage(f"reading {log}")
        found = read_json_lines(log)
        tokens, squares, seconds = _timed_ranks(log, found)
        on_stage("fitting")
        cost = MeasuredCost.fit_sums(tokens, squares, seconds, **_counted_as(log, found))
    path = out or log.with_name(f"{log.stem}-cost.json")
    cost.save(path)
    per_token, per_square = cost.linear * cost.seconds_per_unit, cost.quadratic * cost.seconds_per_unit
    error = np.abs(cost.seconds_per_step + per_token * tokens + per_square * squares - seconds) / seconds
    median, high = np.percentile(error, (50, 95)).tolist()
    console.print_result(
        f"{len(seconds):,} times of {len(found.records):,} steps: {1e3 * cost.seconds_per_step:.3g} ms per step, "
        f"{1e6 * per_token:.3g} us per token, {1e9 * per_square:.3g} ns per squared token",
        times=len(seconds),
        steps=len(found.records),
        seconds_per_step=cost.seconds_per_step,
        seconds_per_token=per_token,
        seconds_per_squared_token=per_square,
    )
    errors = f"error of a time: {median:.1%} in the median, {high:.1%} at the 95th percentile"
    console.print_result(errors, error_p50=median, error_p95=high)
    console.print_result(f"cost: {path}", cost=path)


def _timed_ranks(path: Path, log: "BalanceLog") -> tuple[Any, Any, Any]:
    """Return tokens, squared tokens and seconds of each rank in each timed step: float64 [n] each."""
    import numpy as np

    timed = [record for record in log.records if record.compute_seconds is not None]
    if not timed:
        raise DataError(f"{path} has no measured times; train with a StepTimer(JsonLines(...), ...) as on_step")
    tokens, squares, seconds = (
        np.concatenate([getattr(record, name) for record in timed]).astype(np.float64)
        for name in ("rank_tokens", "rank_squares", "compute_seconds")
    )
    return tokens, squares, seconds


def _counted_as(path: Path, log: "BalanceLog") -> dict[str, Any]:
    """Return how the cost of the run counted tokens, so that the fitted one counts them alike."""
    counted = log.run.options.get("tokens") if log.run else None
    names = ("history_key", "interleave_actions", "contextual", "max_tokens")
    if not isinstance(counted, dict) or counted.keys() != set(names):
        raise DataError(
            f"{path} does not say which tokens its cost counts; record the run with a cost of the package, such as "
            "LinearCost(interleave_actions=False)"
        )
    return {**counted, "contextual": tuple(counted["contextual"])}
