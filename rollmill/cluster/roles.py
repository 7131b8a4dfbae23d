"""What each process of a run does: open the stores, put the parts together, run. Wiring only."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from aiohttp import web

from rollmill import telemetry
from rollmill.chat.formats.compact import SPECIAL_TOKENS, CompactFormat
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.cluster.run import RunDirectory
from rollmill.environments.harnesses.coding import CodingHarness
from rollmill.environments.machine import MachineHost
from rollmill.environments.machines.namespace.client import NamespaceHost
from rollmill.environments.rewards.hidden_tests import HiddenTests
from rollmill.environments.tasks.demonstrations import Demonstrations, tokenizer_texts
from rollmill.environments.tasks.micro_repos import MicroRepos
from rollmill.evals.run import EvalResult, run_eval
from rollmill.evals.suite import EvalConfig
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint
from rollmill.rollouts.client import GatewayClient
from rollmill.rollouts.dispatcher import Dispatcher
from rollmill.rollouts.rollout import Stage
from rollmill.rollouts.simulation import SlowMachines
from rollmill.storage.database import open_database
from rollmill.storage.http import object_app
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.store import WeightStore
from rollmill.weights.transfer import Mirror

TOKENIZER_SESSIONS = 2000  # generated sessions the vocabulary is learnt from
COMMIT_POLL_S = 0.1


def midtrain(run: RunDirectory) -> None:
    """Mid-train the base line from random weights to its last step; nothing to do if it is there."""
    from rollmill.training.loop import Trainer
    from rollmill.training.objectives.midtrain import MidtrainObjective

    config = run.config
    tokenizer = _make_tokenizer(run)
    objective = MidtrainObjective(
        config.midtrain,
        Demonstrations(CompactFormat(tokenizer), tokenizer),
        seed=config.seed,
        max_context=config.model.max_context,
        tokens_per_microbatch=config.midtrain.training.tokens_per_microbatch,
    )
    objects = Objects.open(run.store_path(config.regions[0]))
    Trainer(
        config.midtrain.training,
        config.model,
        objective,
        WeightStore(objects),
        objects,
        config.base_line,
        steps=config.midtrain.steps,
        seed=config.seed,
    ).run(config.midtrain.steps)


def train(run: RunDirectory) -> None:
    """Reinforce the line, from the newest version of the base line, until its last step is committed."""
    from rollmill.training.loop import Trainer
    from rollmill.training.objectives.rl import Pace, RLObjective

    config = run.config
    objects = Objects.open(run.store_path(config.regions[0]))
    weights = WeightStore(objects)
    database = open_database(run.database_url)
    base = weights.head(config.base_line)
    assert base is not None, "mid-training comes first"
    objective = RLObjective(
        config.rl,
        Ledger(database, config.name),
        TrajectoryStore(database, objects),
        pace=Pace(config.groups_per_step, config.group_size, config.max_staleness),
        model_config=config.model,
        tokens_per_microbatch=config.training.tokens_per_microbatch,
    )
    Trainer(
        config.training,
        config.model,
        objective,
        weights,
        objects,
        config.line,
        Version(config.base_line, base),
        steps=config.steps,
        seed=config.seed,
    ).run(config.steps)


def serve_store(run: RunDirectory) -> None:
    """The home store over HTTP, read-only, for the other regions."""
    objects = Objects.open(run.store_path(run.config.regions[0]))
    _serve(object_app(objects, run.admin_token), run.ports["store"])


def serve_engine(run: RunDirectory, region: str, version: str | None = None) -> None:
    """An engine that follows the line, or stays at one version. Outside the home region it mirrors the home store."""
    from rollmill.inference.server import serve_engine

    own = Objects.open(run.store_path(region))
    home = region == run.config.regions[0]
    source = None if home else Objects.open(run.url("store"), token=run.admin_token)
    serve_engine(
        run.config.engine,
        run.config.model,
        WeightStore(own),
        line=run.config.line,
        mirror=Mirror(source, own) if source else None,
        pinned=int(version) if version else None,
        name=f"engine-{region}",
        region=region,
        port=run.ports[f"engine-{region}"],
    )


def serve_gateway(run: RunDirectory) -> None:
    tokenizer = Tokenizer.load(run.path / "tokenizer.json")
    objects = Objects.open(run.store_path(run.config.regions[0]))
    engines = [EngineEndpoint(run.url(f"engine-{region}"), region) for region in run.config.regions]
    app = make_app(
        run.config.gateway,
        CompactFormat(tokenizer),
        tokenizer,
        engines,
        TrajectoryStore(open_database(run.database_url), objects),
        objects,
        run.path / "gateway",
        run.admin_token,
        run.production_key,
    )
    _serve(app, run.ports["gateway"])


def dispatch(run: RunDirectory) -> None:
    """Evaluate the starting point, run every group of the run, evaluate what came of it."""
    asyncio.run(_dispatch(run))


async def _dispatch(run: RunDirectory) -> None:
    config = run.config
    ledger = Ledger(open_database(run.database_url), config.name)
    async with open_stage(run) as stage:
        await _evaluate_once(run, stage, "before", 0)
        if config.steps == 0:
            return
        telemetry.emit("stage", stage="reinforce", index=2, stages=4, state="start")
        await Dispatcher(
            stage,
            ledger,
            MicroRepos(),
            config.rollouts,
            run=config.name,
            seed=config.seed,
            group_size=config.group_size,
            bound=config.staleness_bound,
            total_groups=config.steps * config.groups_per_step,
        ).run()
        while await asyncio.to_thread(ledger.committed) < config.steps:
            await asyncio.sleep(COMMIT_POLL_S)
        telemetry.emit("stage", stage="reinforce", index=2, stages=4, state="end")
        await _evaluate_once(run, stage, "after", config.steps)


async def _evaluate_once(run: RunDirectory, stage: Stage, label: str, version: int) -> None:
    """An evaluation that is recorded is not repeated when the run is resumed."""
    key = f"evals/{run.config.name}/{label}.json"
    if stage.objects.head(key) is not None:
        return
    name, index = f"evaluate {label}", {"before": 1, "after": 3}[label]
    telemetry.emit("stage", stage=name, index=index, stages=4, state="start")
    results = await run_eval(
        stage, MicroRepos(), run.config.evals, run=run.config.name, label=label, version=version
    )
    stage.objects.create(key, json.dumps([asdict(result) for result in results]).encode())
    telemetry.emit("stage", stage=name, index=index, stages=4, state="end")


async def evaluate(run: RunDirectory, suite: EvalConfig, version: int) -> list[EvalResult]:
    """Evaluate a version that the engines of a running cluster are pinned to."""
    async with open_stage(run) as stage:
        return await run_eval(
            stage, MicroRepos(), suite, run=run.config.name, label=f"version-{version}", version=version
        )


@contextlib.asynccontextmanager
async def open_stage(run: RunDirectory) -> AsyncIterator[Stage]:
    config = run.config
    objects = Objects.open(run.store_path(config.regions[0]))
    host = NamespaceHost(config.machine)
    machines: MachineHost = host
    if config.rollouts.simulated_tool_seconds:
        machines = SlowMachines(host, config.rollouts.simulated_tool_seconds, config.seed)
    harness = CodingHarness(config.harness)
    try:
        async with GatewayClient(run.url("gateway"), run.admin_token) as gateway:
            await gateway.wait_until_healthy()
            yield Stage(
                gateway=gateway,
                machines=machines,
                grading_machines=host,
                harness=harness,
                grader=HiddenTests(),
                trajectories=TrajectoryStore(open_database(run.database_url), objects),
                objects=objects,
                timeout_s=config.rollouts.timeout_s,
            )
    finally:
        await harness.close()
        await host.close()


def _make_tokenizer(run: RunDirectory) -> Tokenizer:
    """The run's vocabulary, learnt from generated sessions: the same for every run of the same vocabulary size."""
    path = run.path / "tokenizer.json"
    if not path.exists():
        texts = tokenizer_texts(TOKENIZER_SESSIONS)
        tokenizer = Tokenizer(train_tokenizer(texts, run.config.model.vocab_size, SPECIAL_TOKENS))
        tokenizer.save(path)
    return Tokenizer.load(path)


def _serve(app: web.Application, port: int) -> None:
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=_silent, shutdown_timeout=2.0)


def _silent(*_: Any) -> None:
    """aiohttp's banner tells of Ctrl-C, which nobody can press here."""
