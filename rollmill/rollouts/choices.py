"""Which task each group gets: asks the sampler, with the results of committed steps.

A choice follows from the seed, the group's index and the version committed when the group is admitted. The ledger keeps
the task and that version with the group. So a dispatcher that is started again makes the choices it would have made.
"""

from __future__ import annotations

from rollmill.environments.sampler import Draw, Results, Sampler
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import RollmillError, TaskError
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace


class Choices:
    def __init__(self, sampler: Sampler, tasks: TaskSet, ledger: Ledger, pace: Pace, seed: int) -> None:
        self._sampler, self._tasks, self._ledger, self._pace, self._seed = sampler, tasks, ledger, pace, seed
        self._results = Results()
        self._read = 0  # the newest step whose results are in

    def read(self, committed: int) -> None:
        """Take in the results of the steps up to `committed`."""
        if committed <= self._read:
            return  # most groups start while no step was committed
        for result in self._ledger.results(self._read, committed):
            known = self._results.of(result.task_id)
            known.add(reward=result.reward, solved=result.solved, turns=result.turns, tokens=result.tokens)
        self._read = committed

    def choose(self, index: int, committed: int) -> Task:
        """The task of group `index`, if it starts while `committed` is the newest committed step. The run is locked
        meanwhile, so nothing is read here."""
        assert self._read >= committed, "`read` comes first"
        progress = committed / self._pace.steps if self._pace.steps else 0.0
        try:
            task = self._sampler.choose(self._tasks, Draw(index, self._seed, progress, self._results))
        except RollmillError:
            raise
        except Exception as error:  # sampler and task set may be code of the user
            raise TaskError(
                f"the sampler {self._sampler.name!r} chose no task: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(task, Task):
            raise TaskError(f"the sampler {self._sampler.name!r} returned {type(task).__name__}, not a Task")
        return task
