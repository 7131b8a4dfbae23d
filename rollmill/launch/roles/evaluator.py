"""Evaluates one version of a stage while it trains (`evals.every`), then ends. The supervisor starts it when a version
is due, see rollmill/launch/evaluations.py. Its attempts are none of the stage's groups, so no step trains on them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import asdict

from rollmill import telemetry
from rollmill.environments.environment import build_tasks
from rollmill.errors import ObjectExists, RollmillError, StorageError
from rollmill.evals.kept import Kept
from rollmill.launch.roles.dispatcher import evaluate_in, open_context
from rollmill.runs.run import RunDirectory
from rollmill.runs.stages import attempts_folder, during, leave_out, results_key


def main(run: RunDirectory, stage: str, number: str, service: str = "") -> None:
    """`service`: the name of the one whose engine serves the version; without it the engines of the run answer."""
    telemetry.label_events(stage=stage)
    asyncio.run(_evaluate(run, stage, int(number), run.service(service) if service else run))


async def _evaluate(run: RunDirectory, stage: str, number: int, asked: RunDirectory) -> None:
    """Evaluate and record the results. An evaluation that fails is left out: it must not end the training."""
    objects, label = run.objects(), during(run.config.stage(stage), number)
    if await asyncio.to_thread(objects.head, results_key(run, label)) is not None:
        return
    kept = Kept(objects, attempts_folder(run, label, number))
    try:
        async with open_context(asked, stage) as context:
            suite = run.config.evals.while_training()
            results = await evaluate_in(asked, context, build_tasks(run.config), suite, label, number, kept=kept)
        with contextlib.suppress(ObjectExists):
            objects.create(results_key(run, label), json.dumps(list(map(asdict, results))).encode())
    except StorageError:
        raise  # it is started again, and goes on with the attempts that are kept
    except RollmillError as error:
        leave_out(run, label, number, str(error))
    await asyncio.to_thread(kept.clear)
