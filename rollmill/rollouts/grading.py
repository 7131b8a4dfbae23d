"""Grades an episode, and retries when the grader is not available.

MachineError        the host failed: the episode is graded again, at most `attempts` times
Overcommitted       the host was so busy that a time-out says nothing: the episode is graded again, alone
RewardUnavailable   a judge is down: it is asked again until `timeout_s` is over, and a warning is shown. In training,
                    the time in which no episode at all could be graded does not count: the run waits for its judge
any other error     raised at once

An episode without a grade fails with a reason. It never gets a reward of 0: the policy would learn from an outage.
"""

from __future__ import annotations

import asyncio

from rollmill import telemetry
from rollmill.backoff import Backoff
from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward, grade_episode
from rollmill.environments.task import Task
from rollmill.errors import MachineError, Overcommitted, RewardError, RewardUnavailable
from rollmill.types import Grade

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_AROUND_S = 60.0  # for machines that grading creates


class Stalls:
    """The episodes of a process that wait for a judge. Only the first of them warns.

    With `patient`, an outage of the judge ends no episode: a run that went on would drop every episode it plays.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._waiting: set[str] = set()
        self.patient = patient
        self.graded = 0  # episodes that got a grade

    def begin(self, trajectory: str, problem: str) -> None:
        if trajectory in self._waiting:
            return
        self._waiting.add(trajectory)
        telemetry.emit("stall", trajectory=trajectory, waiting=len(self._waiting), reason=problem)
        if len(self._waiting) == 1:
            telemetry.emit("warning", text=f"grading waits: {problem}")

    def end(self, trajectory: str) -> None:
        if trajectory in self._waiting:
            self._waiting.discard(trajectory)
            telemetry.emit("stall", trajectory=trajectory, waiting=len(self._waiting), reason=None)


def own_limit(task: Task) -> float:
    """Seconds that the task's own tests may take, and what surrounds them. Tests that hang must be graded as hanging:
    a grading that is given up earlier would drop the episode, and the policy could escape a zero."""
    own, commands = task.grading.get("timeout_s"), 2 if task.grading.get("run") else 1
    return commands * float(own) + _AROUND_S if isinstance(own, int | float) else 0.0


async def grade_patiently(
    grader: Reward, episode: Episode, trajectory: str, stalls: Stalls, *, timeout_s: float, attempts: int
) -> Grade:
    """The grader's reward. RewardError if there is none after `timeout_s` and the task's own limit.

    Both limits are longer in slow machines, as the limits of the commands there are.
    """
    timeout_s = max(timeout_s, own_limit(episode.task)) * await episode.machines.slowdown(episode.task.image)
    problem = "grading does not end"
    alone, now = False, asyncio.get_running_loop().time
    backoff = Backoff(min(_FIRST_PAUSE_S, timeout_s / 10), _LONGEST_PAUSE_S)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while True:
                asked, graded, down = now(), stalls.graded, False
                try:
                    async with episode.machines.turn(alone=alone):  # waiting for it is not part of the grading
                        _put_off(limit, now() - asked)
                        asked = now()
                        reward = await grade_episode(grader, episode)
                        stalls.graded += 1
                        return reward
                except Overcommitted:
                    alone = True
                    continue
                except RewardUnavailable as error:
                    problem = error.message
                    stalls.begin(trajectory, problem)
                    down = True
                except MachineError:
                    if backoff.failures + 1 >= attempts:
                        raise
                pause = backoff.failed()
                if down and stalls.patient and stalls.graded == graded:
                    _put_off(limit, now() - asked + pause)
                await asyncio.sleep(pause)
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        stalls.end(trajectory)
    raise RewardError(
        f"no grade after {timeout_s:g} s: {problem}", hint="`rollouts.grading_timeout_s` is the time limit"
    )


def _put_off(limit: asyncio.Timeout, seconds: float) -> None:
    when = limit.when()
    assert when is not None, "it has a limit"
    limit.reschedule(when + seconds)
