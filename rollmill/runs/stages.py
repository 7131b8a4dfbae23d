"""How far the stages of a run are, read from its stores; and when it is evaluated.

before        the first stage that learns from rollouts, before its first step
after-NAME    after stage NAME
after         the last evaluation of the run
during-NAME-N version N of stage NAME, while it trains: `evals.every`
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from rollmill import telemetry
from rollmill.environments.environment import each_environment
from rollmill.errors import ObjectExists
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.objects import Objects
from rollmill.training.stage import RolloutSettings, StageSection
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore, newest_line

BEFORE, AFTER, DURING = "before", "after", "during-"
IMPORT = "import"


@dataclass(frozen=True)
class Evaluation:
    label: str
    stage: StageSection

    @property
    def first(self) -> bool:
        """It is of version 0 of the stage's line, otherwise of the last version."""
        return self.label == BEFORE


def evaluations(config: RunConfig) -> list[Evaluation]:
    """Every evaluation of the run, in order."""
    after = [stage for stage in config.stages if _is_evaluated(stage)]
    first = next((stage for stage in config.stages if isinstance(stage, RolloutSettings)), None)
    found = []
    for stage in config.stages:
        if stage is first and each_environment(config):
            found.append(Evaluation(BEFORE, stage))
        if stage in after:
            found.append(Evaluation(AFTER if stage is after[-1] else f"after-{stage.name}", stage))
    return found


def _is_evaluated(stage: StageSection) -> bool:
    return bool(isinstance(stage, RolloutSettings) and stage.steps) if stage.evaluate is None else stage.evaluate


def phases(config: RunConfig) -> list[str]:
    """The names of the phases of a run, in order."""
    found = [IMPORT] if config.stages and isinstance(config.stages[0], RolloutSettings) else []
    for stage in config.stages:
        labels = [each.label for each in evaluations(config) if each.stage is stage]
        found += [f"evaluate {BEFORE}"] if BEFORE in labels else []
        found += [stage.name]
        found += [f"evaluate {label}" for label in labels if label != BEFORE]
    return found


def last_version(weights: WeightStore, stage: StageSection, form: str) -> Version | None:
    """The newest version of a stage; None before the first one."""
    line = newest_line(weights, stage.name)
    number = weights.head(line, form)
    return None if number is None else Version(line, number)


def newest_step(run: RunDirectory, stage: StageSection, form: str | None = None) -> int | None:
    """The step of the newest version of a stage in `form`, or in the run's own; None before the first version."""
    home = run.existing_home()
    if home is None:
        return None
    weights, form = WeightStore(home), form or run.config.form
    version = last_version(weights, stage, form)
    if version is None:
        return None
    step = weights.manifest(version, form).step
    return version.number if step is None else step


def is_trained(run: RunDirectory, stage: StageSection) -> bool:
    """Whether nothing of a stage is left to train: no step follows the newest one, which is published in every form."""
    step = newest_step(run, stage)
    return all(newest_step(run, stage, form) == step for form in run.config.forms) and is_last(run, stage, step)


def is_last(run: RunDirectory, stage: StageSection, step: int | None) -> bool:
    """Whether no step follows `step`, the newest published one. If the stage has a ledger, `step` is committed, and
    training may have ended before the last step of the settings, because nothing was left to take."""
    if not step or not isinstance(stage, RolloutSettings):
        return step == stage.steps

    ledger = run.ledger(stage)
    return ledger.committed() == step and (step == stage.steps or ledger.is_spent(stage.pace(stage.steps)))


def during(stage: StageSection, number: int) -> str:
    """The label of the evaluation of a version while its stage trains."""
    return f"{DURING}{stage.name}-{number}"


def results_key(run: RunDirectory, label: str) -> str:
    """The results of an evaluation; an empty list says that one of `evals.every` was left out."""
    return f"evals/{run.id}/{label}.json"


def attempts_folder(run: RunDirectory, label: str, number: int) -> str:
    """The attempts of an evaluation of version `number` that is not complete."""
    return f"evals/{run.id}/attempts/{label}/{number}"


def recorded(run: RunDirectory) -> set[str]:
    """The labels of the evaluations that have results, or were left out."""
    folder = f"evals/{run.id}"
    names = (key.removeprefix(f"{folder}/") for key in run.objects().list(folder))
    return {name.removesuffix(".json") for name in names if "/" not in name}


def attempts_begun(run: RunDirectory) -> set[str]:
    """The labels of the evaluations that have attempts, but no results yet."""
    folder = f"evals/{run.id}/attempts"
    return {key.removeprefix(f"{folder}/").partition("/")[0] for key in run.objects().list(folder)}


def leave_out(run: RunDirectory, label: str, number: int, why: str) -> None:
    """Record that an evaluation of `evals.every` has no results and will get none. Nobody needs its attempts then."""
    objects = run.objects()
    with contextlib.suppress(ObjectExists):
        objects.create(results_key(run, label), b"[]")
        telemetry.emit("eval_left_out", label=label, version=number, reason=why)
    objects.delete_all(objects.list(attempts_folder(run, label, number)))


def is_recorded(run: RunDirectory, objects: Objects, evaluation: Evaluation, number: int) -> bool:
    """Whether the evaluation has results of version `number`. A run that was extended is evaluated again."""
    key = results_key(run, evaluation.label)
    if objects.head(key) is None:
        return False
    try:
        return bool(json.loads(objects.get(key))[0]["version"] == number)
    except (ValueError, LookupError, TypeError):  # damaged: it is made again
        return False


def left_to_evaluate(run: RunDirectory, stage: StageSection) -> list[Evaluation]:
    """The evaluations of a stage that has no step left to train."""
    objects = run.objects()
    last = last_version(WeightStore(objects), stage, run.config.form)
    return [
        each
        for each in evaluations(run.config)
        if each.stage is stage and not is_recorded(run, objects, each, 0 if each.first or last is None else last.number)
    ]
