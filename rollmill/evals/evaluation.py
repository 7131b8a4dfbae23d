"""Run an evaluation: the same rollouts as training, on held-out tasks, against the version the engines serve."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rollmill import telemetry
from rollmill.environments.environment import Environments
from rollmill.environments.rewards import transcript
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import RollmillError
from rollmill.evals.kept import Kept
from rollmill.evals.statistics import clustered_interval, pass_at
from rollmill.evals.suite import Cell, EvalConfig
from rollmill.rollouts.agent_endpoint import EndpointProxy, play
from rollmill.rollouts.config import RolloutConfig
from rollmill.rollouts.rollout import Outcome, Rollout, as_id, provenance_of, rollout_seed
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.types import Sampling

MAX_FAILED_SHARE = 0.05


@dataclass(frozen=True)
class Conduct:
    """What one attempt cost, and how it behaved. Of one that the infrastructure lost, nothing is known."""

    solved: bool
    tokens: int
    seconds: float
    calls: int
    malformed: int  # tool calls that the harness could not run
    asked: bool  # it ended with a question instead of work
    lost: bool = False
    engine_seconds: float = 0.0  # its share of the seconds that engines computed; 0.0 of all attempts: not known
    reward: float | None = None  # None: 1 if it is solved, else 0
    versions: tuple[int, int] | None = None  # the oldest and the newest that sampled it

    @property
    def earned(self) -> float:
        return float(self.solved) if self.reward is None else self.reward

    @classmethod
    def of(cls, outcome: Outcome) -> Conduct:
        result = outcome.result
        if outcome.reward is None:
            return cls(False, 0, 0.0, 0, 0, False, lost=True)
        calls, malformed = (result.tool_calls, result.bad_tool_calls) if result else (0, 0)
        told = (outcome.tokens, outcome.seconds, calls, malformed, outcome.asked)
        return cls(outcome.solved, *told, reward=outcome.reward.value, versions=outcome.versions)


@dataclass(frozen=True)
class EvalResult:
    label: str
    split: str  # or the name of the suite of [[evals.suites]]
    mode: str
    version: int
    solved: int
    attempts: int
    failed: int  # attempts that infrastructure lost: not counted as attempts
    rate: float  # of solved attempts: pass@1
    low: float  # 95 % interval, attempts of one task taken together
    high: float
    reward: float  # the mean, with its interval
    reward_low: float
    reward_high: float
    k: int  # attempts per task
    solved_once: float | None  # share of tasks that k attempts solve at least once; None: no task has as many
    seconds: float
    by_task: dict[str, list[bool]]  # task id → what became of its attempts
    example_solved: str | None = None  # a trajectory worth reading
    example_unsolved: str | None = None
    conduct: dict[str, list[Conduct]] = field(default_factory=dict)  # task id → how its attempts went, lost ones too
    families: dict[str, str] = field(default_factory=dict)  # task id → its family, of those that have one
    environments: dict[str, str] = field(default_factory=dict)  # task id → its environment, where a run has several
    oldest: int | None = None  # the oldest and the newest version that sampled a token
    newest: int | None = None


@dataclass(frozen=True)
class Examination:
    """What is evaluated: weights at least as new as `version`, recorded under the run's id and `label`.

    Every attempt's sampling seed follows from `seed`, its task and its number. So two versions of one run meet the
    same draws, and an evaluation that is repeated samples the same tokens.
    """

    run: str
    label: str
    version: int
    max_answer_tokens: int
    seed: int
    rounds: range = range(1)  # range(1, 3) makes twice as many more attempts, after those of the first round

    @property
    def index_run(self) -> str:
        """The run that the index lists the attempts under."""
        return f"{self.run}/eval-{self.label}"


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is. `total` counts the attempts of all cells."""

    done: int
    total: int
    seconds_left: float | None  # at the pace so far; None before the first attempt has ended


OnProgress = Callable[[Progress], None]
PROGRESS_EVERY_S = 0.5


class _Counter:
    """Counts attempts that ended; emits `eval_progress` and calls `on_progress` at most twice per second."""

    def __init__(self, label: str, total: int, on_progress: OnProgress | None) -> None:
        self._label, self._total, self._on_progress = label, total, on_progress
        self._done = 0
        self._started = time.monotonic()
        self._tell()

    def count(self) -> None:
        self._done += 1
        if self._done == self._total or time.monotonic() - self._told_at >= PROGRESS_EVERY_S:
            self._tell()

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        pace = (self._told_at - self._started) / self._done if self._done else None
        left = None if pace is None else pace * (self._total - self._done)
        progress = Progress(self._done, self._total, left)
        telemetry.emit("eval_progress", label=self._label, done=self._done, total=self._total, seconds_left=left)
        if self._on_progress is not None:
            self._on_progress(progress)


# one attempt at a task: the task, its cell, the task's index in the cell, the number of the attempt
Attempt = Callable[[Task, Cell, int, int], Awaitable[Outcome]]


async def run_eval(
    context: RolloutContext,
    tasks: TaskSet,
    config: EvalConfig,
    examination: Examination,
    on_progress: OnProgress | None = None,
    *,
    alone: bool = False,
    kept: Kept | None = None,
) -> list[EvalResult]:
    """Evaluate every cell of the suite on the version that the engines serve. Attempts that `kept` has are not made
    again.

    `alone` says that no other process runs this evaluation: attempts that are still open are then interrupted ones.
    Otherwise only those are that have been open for twice the time limit.
    """
    still_running_s = 0.0 if alone else 2 * context.longest_s
    await asyncio.to_thread(context.trajectories.fail_interrupted, examination.index_run, still_running_s)
    await context.gateway.wait_until_serving(examination.version, context.line)
    # an evaluation that is run again, after a crash for example, makes new trajectories
    prefix = f"{examination.run}-{examination.label}-{secrets.token_hex(3)}"

    async def attempt(task: Task, cell: Cell, index: int, number: int) -> Outcome:
        group = f"{as_id(f'{prefix}-{cell.name}-{cell.mode}')}-{index:04d}"
        made = functools.partial(_attempt, context, task, cell, examination, group, number)
        return await made() if kept is None else await kept.get(f"{cell.name}-{cell.mode}", task, number, made)

    return await run_cells(tasks, config, examination, attempt, on_progress)


async def run_cells(
    tasks: TaskSet,
    config: EvalConfig,
    examination: Examination,
    attempt: Attempt,
    on_progress: OnProgress | None = None,
) -> list[EvalResult]:
    """Make every attempt of the suite, `config.concurrency` at once, and sum them up by cell."""
    cells = [(cell.repeated(examination.rounds), cell.chosen(tasks)) for cell in config.cells(tasks)]
    counter = _Counter(examination.label, sum(cell.attempts * len(suite) for cell, suite in cells), on_progress)
    results = []
    for cell, suite in cells:
        started = time.time()
        outcomes = await _attempt_cell(cell, suite, attempt, config.concurrency, counter)
        result = _summarise(outcomes, cell, examination, time.time() - started, suite)
        telemetry.emit("eval", **asdict(result))
        results.append(result)
    return results


async def _attempt_cell(
    cell: Cell, suite: list[Task], attempt: Attempt, concurrency: int, counter: _Counter
) -> dict[str, list[Outcome]]:
    """The outcomes of all attempts, by task id."""
    slots = asyncio.Semaphore(concurrency)

    async def in_slot(task: Task, index: int, number: int) -> Outcome:
        async with slots:
            outcome = await attempt(task, cell, index, number)
        counter.count()
        return outcome

    try:
        async with asyncio.TaskGroup() as running:
            attempts = {
                task.id: [running.create_task(in_slot(task, index, cell.first + made)) for made in range(cell.attempts)]
                for index, task in enumerate(suite)
            }
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # a store that is down; the others were cancelled
    return {task: [one.result() for one in ended] for task, ended in attempts.items()}


async def _attempt(
    context: RolloutContext, task: Task, cell: Cell, examination: Examination, group: str, number: int
) -> Outcome:
    """One attempt. Its trajectory row is created here, when it runs: an interrupted evaluation leaves few behind."""
    run, id = examination.index_run, f"{group}-{number}"
    provenance = {**provenance_of(task), "mode": cell.mode, **({"suite": cell.suite} if cell.suite else {})}
    await asyncio.to_thread(context.trajectories.create, run, group, task.id, [id], provenance=provenance)
    sampling = sampling_of(task, cell, number, examination)
    facts = {"run": run, "group_id": group, "provenance": provenance}
    return await Rollout(context, task, id, sampling=sampling, min_version=examination.version, facts=facts).run()


async def evaluate_endpoint(
    environments: Environments,
    tasks: TaskSet,
    config: EvalConfig,
    proxy: EndpointProxy,
    examination: Examination,
    limits: RolloutConfig,
    on_progress: OnProgress | None = None,
) -> list[EvalResult]:
    """Evaluate any OpenAI-compatible endpoint on the tasks of a run, with the same statistics."""

    async def attempt(task: Task, cell: Cell, index: int, number: int) -> Outcome:
        played = await play(environments, proxy, task, sampling_of(task, cell, number, examination), limits)
        episode = played.episode
        return Outcome(
            f"{task.id} #{number}",
            played.reward,
            episode.result,
            episode.tokens,
            played.reason,
            seconds=episode.seconds,
            asked=transcript.asks(episode),
        )

    return await run_cells(tasks, config, examination, attempt, on_progress)


def sampling_of(task: Task, cell: Cell, number: int, examination: Examination) -> Sampling:
    return Sampling(
        temperature=cell.temperature,
        max_tokens=examination.max_answer_tokens,
        seed=rollout_seed(examination.seed, task.id, number),
    )


def _summarise(
    by_task: Mapping[str, list[Outcome]],
    cell: Cell,
    examination: Examination,
    seconds: float,
    suite: Sequence[Task],
) -> EvalResult:
    """The figures of one cell. Failed attempts are left out of them; with too many of them they would mislead."""
    graded = {task: [outcome for outcome in outcomes if outcome.reward] for task, outcomes in by_task.items()}
    attempts = sum(map(len, graded.values()))
    failed = sum(map(len, by_task.values())) - attempts
    if failed > MAX_FAILED_SHARE * (attempts + failed):
        reason = next(outcome.reason for outcomes in by_task.values() for outcome in outcomes if outcome.reason)
        raise RollmillError(
            f"evaluation {examination.label!r}: {failed} of {attempts + failed} attempts failed, the first: {reason}",
            hint="a rate without that many attempts would mislead; fix the cause and run the evaluation again",
        )
    solved = {task: [outcome.solved for outcome in outcomes] for task, outcomes in graded.items() if outcomes}
    rewards = [[each.reward.value for each in outcomes if each.reward] for outcomes in graded.values()]
    rate, reward = clustered_interval(list(solved.values())), clustered_interval(rewards)
    whole = [pass_at(cell.attempts, outcomes) for outcomes in solved.values() if len(outcomes) >= cell.attempts]
    flat = [outcome for outcomes in graded.values() for outcome in outcomes]
    versions = [version for outcome in flat if outcome.versions for version in outcome.versions]
    return EvalResult(
        label=examination.label,
        split=cell.name,
        mode=cell.mode,
        version=examination.version,
        solved=sum(outcome.solved for outcome in flat),
        attempts=attempts,
        failed=failed,
        rate=rate.value,
        low=rate.low,
        high=rate.high,
        reward=reward.value,
        reward_low=reward.low,
        reward_high=reward.high,
        k=cell.attempts,
        solved_once=sum(whole) / len(whole) if whole else None,
        seconds=seconds,
        by_task=solved,
        example_solved=next((outcome.trajectory for outcome in flat if outcome.solved), None),
        example_unsolved=next((outcome.trajectory for outcome in flat if not outcome.solved), None),
        conduct={task: [Conduct.of(outcome) for outcome in outcomes] for task, outcomes in by_task.items()},
        families={task.id: task.family for task in suite if task.family},
        environments={task.id: task.environment for task in suite if task.environment},
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
    )
