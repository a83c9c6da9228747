"""A step on its way through a Balancer's `start`, `launch` and `finish`."""

import contextlib
import enum
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from evenrank.core.errors import ConfigError
from evenrank.dataloader.balance.exchange.exchange import StepInFlight
from evenrank.dataloader.balance.step_planner import PlannedStep


class State(enum.StrEnum):
    """The last thing that was done to a step."""

    STARTED = "started"
    LAUNCHED = "launched"
    FINISHED = "finished"


@dataclass(kw_only=True, slots=True)
class Handle:
    """A step on its way through `start`, `launch` and `finish`."""

    state: State = State.STARTED
    """The last thing that was done to it."""

    planned: Future[PlannedStep]
    """Its plan, made in the background."""

    in_flight: StepInFlight | None = None
    """Its exchange, once it is launched; None if no rank has batches left."""

    waited_seconds: float = 0.0
    """Time that the training thread waited for the plan."""

    exchange_seconds: float = 0.0
    """Time to pack, to wait for the collective and to unpack, on the training thread."""


def check_state(handle: Handle, state: State, rule: str) -> None:
    """Check that this was the last thing done to a step.

    Raises:
        ConfigError: it was not; the message has the rule, which begins with a verb.

    """
    if handle.state != state:
        raise ConfigError(f"a step {rule}; this one is {handle.state}")


def drain(handles: Iterable[Handle]) -> None:
    """Wait for plans, and for collectives on the CPU, so that the collectives of all ranks stay in step.

    Their results no longer matter. On a GPU, collectives follow each other on their stream without the host.
    """
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.planned.result()
        if handle.in_flight is not None and handle.in_flight.work is not None:
            with contextlib.suppress(RuntimeError):
                handle.in_flight.work.wait()
