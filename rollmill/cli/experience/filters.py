"""Options that choose trajectories, the same for `rollmill trajectories list`, `export` and `admit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.trajectories.query import Order, Range, TrajectoryQuery
    from rollmill.trajectories.trajectory_store import TrajectoryStore

_RANGE = "NUMBER, LOW..HIGH, LOW.. or ..HIGH"

State = Annotated[str | None, typer.Option(help="running, finished, graded, failed, quarantined, deleted")]
Solved = Annotated[bool, typer.Option("--solved", help="solved, as the first reward says")]
RewardRange = Annotated[str | None, typer.Option(help=f"the newest reward: {_RANGE}")]
LengthRange = Annotated[str | None, typer.Option(help=f"all tokens, prompts included: {_RANGE}")]
Task = Annotated[str | None, typer.Option(help="the task, or the beginning of its id")]
VersionRange = Annotated[str | None, typer.Option(help=f"of the weights that sampled it: {_RANGE}, or LINE@NUMBER")]
Split = Annotated[str | None, typer.Option(help="train, heldout, …")]
Sort = Annotated[str, typer.Option(help="newest, oldest, reward, length, task or version")]


def query_of(
    state: str | None,
    solved: bool,
    reward: str | None,
    length: str | None,
    task: str | None,
    version: str | None,
    split: str | None,
    sort: str,
    limit: int | None,
) -> TrajectoryQuery:
    """The query that the options describe."""
    from rollmill.trajectories.query import TrajectoryQuery

    line, _, number = version.rpartition("@") if version is not None else ("", "", None)
    return TrajectoryQuery(
        state=state,
        split=split,
        line=line or None,
        task_prefix=task,
        solved=True if solved else None,
        reward=_parse_range("--reward", reward),
        length=_parse_range("--length", length),
        version=_parse_range("--version", number),
        order=_parse_order(sort),
        limit=limit,
    )


def check_split(store: TrajectoryStore, split: str | None) -> None:
    """Raise ConfigError for a split that no trajectory has: a misspelled one would match nothing."""
    if split is not None and split not in (splits := store.splits()):
        raise ConfigError(f"no trajectory has the split {split!r}", hint=f"splits here: {', '.join(splits) or 'none'}")


def one_state(state: str | None, failed: bool) -> str | None:
    """The state that --state and --failed ask for together. Raises ConfigError if it does not exist."""
    from rollmill.types import TrajectoryState

    if state is not None and state not in set(TrajectoryState):
        raise ConfigError(f"there is no state {state!r}", hint=f"one of {', '.join(TrajectoryState)}")
    if failed and state not in (None, "failed"):
        raise ConfigError(f"--failed and --state {state} exclude each other", hint="leave one of them out")
    return "failed" if failed else state


def _parse_order(text: str) -> Order:
    from rollmill.trajectories.query import ORDERS

    if text not in ORDERS:
        raise ConfigError(f"--sort {text!r} is unknown", hint=f"one of {', '.join(ORDERS)}")
    return text  # type: ignore[return-value]


def _parse_range(option: str, text: str | None) -> Range:
    """`5`, `1..5`, `1..` or `..5`; None is everything."""
    if text is None:
        return None, None
    low, dots, high = text.partition("..")
    try:
        lowest, highest = (float(part) if part else None for part in (low, high if dots else low))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a range of numbers", hint=_RANGE) from None
    return lowest, highest
