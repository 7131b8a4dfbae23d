"""A run on a Ray cluster: Ray decides where each process runs, and starts it again elsewhere when its node is lost.

    `rollmill train`  ──►  supervisor  ──►  a keeper per process  ──►  role process (forked, as on one host)
                           actor            actor                      logs and events ──► the run's store

Actors are detached: the command may leave. The supervisor is what the command is on one host: it drives the stages, and
restarts role processes that exit. A keeper whose node is lost comes back on another node without its process, and the
supervisor starts the process there; while the supervisor itself is away, the processes go on. Roles meet in the run's
stores, so they need no directory of another host. What a node keeps is a cache, or a log that may be lost.

Ray is imported in this module only, and only when it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field

from rollmill import telemetry
from rollmill.backoff import Backoff
from rollmill.cluster.handed import hand_to
from rollmill.cluster.launcher import FINAL, MAX_RESTARTS, STEADY_S, STOP_PATIENCE_S
from rollmill.cluster.launchers.keeper import NODE, Keeper, Supervisor
from rollmill.cluster.launchers.local import describe_exit
from rollmill.cluster.naming import PASSWORD, describe_run
from rollmill.cluster.outbox import bring
from rollmill.cluster.presence import Presence
from rollmill.cluster.ranks import places, rank_name
from rollmill.cluster.run import RunConfig, RunDirectory
from rollmill.config import Config
from rollmill.errors import ConfigError, RollmillError
from rollmill.storage.objects import Objects

NAMESPACE = "rollmill"
REGION = "region"  # label of Ray nodes
LOOK_S = 0.5  # between two looks at all keepers
CONNECT_S = 5.0
PROBE_S = 120.0  # to connect as a driver
PLACE_S = 600.0  # for a supervisor, or the ranks of a trainer, to get their places


class RayConfig(Config):
    address: str = Field(
        "auto",
        description="Address of the Ray cluster, HOST:PORT. `auto`: the one that this host is a node of. The command "
        "must be given on a node.",
    )
    scratch: str = Field(
        "~/.cache/rollmill/nodes",
        description="Directory on every node for caches, logs and the gateway's log of open sessions. It may be lost.",
    )
    labels: dict[str, dict[str, str]] = Field(
        {},
        description='Labels that the nodes of a role must have, by role: `{trainer = {accelerator = "h200"}}`. Roles '
        "are trainer, gateway, dispatcher and engine-REGION.",
    )


class Ray:
    """`[cluster] kind = "ray"`: processes on the nodes of a Ray cluster. Needs `store` and a PostgreSQL `database`; all
    nodes have the same rollmill, and files that the configuration names at the same paths. Roles listen on their node's
    address. If nodes have the label `region`, the engines of a region are on its nodes, and everything else is on those
    of the first region."""

    elsewhere = True

    def __init__(self, config: RayConfig) -> None:
        self.config = config

    def check(self, config: RunConfig) -> None:
        if config.store is None or config.database is None or config.database.startswith("sqlite"):
            missing = "store" if config.store is None else "database"
            raise ConfigError(
                f'[cluster] kind = "ray" needs a {missing} that all nodes reach',
                hint='store = "s3://BUCKET/PREFIX" and database = "postgresql+psycopg://…"',
            )
        if PASSWORD.search(config.database):
            raise ConfigError(
                "the URL of the database has a password, and a run on Ray keeps its configuration in the store",
                hint="leave it out of the URL, and put it into ~/.pgpass on the nodes",
            )
        if config.sinks:
            raise ConfigError(
                '[[sinks]] do not work with [cluster] kind = "ray" yet: events are on many nodes',
                hint="remove [[sinks]]; `rollmill status` and `rollmill dashboard` read the store",
            )
        _check_room(_connect(self.config), config)

    def open(self, run: RunDirectory) -> RayLauncher:
        return RayLauncher(run, self.config, _connect(self.config))

    def submit(self, run: RunDirectory) -> None:
        from rollmill.cluster.prepare import is_prepared

        ray, presence = _connect(self.config), Presence(Objects.open(run.home_store))
        if presence.where() is not None:
            return
        describe_run(run)
        if not is_prepared(run):  # checkpoint and tokenizer are files of this host
            role = [sys.executable, "-P", "-m", "rollmill.cluster.role", "trainer", str(run.path.absolute())]
            if subprocess.run(role, check=False).returncode != 0:
                raise RollmillError(f"{run.path} was not started: see above")
        presence.forget_stop()
        actor = ray.remote(Supervisor).options(**_options(run, "supervisor"), num_cpus=0, get_if_exists=True)
        try:
            made = actor.remote(hand_to(run, "supervisor"), self.config.scratch, node_address, cluster_address, leave)
            ray.get(made.ready.remote(), timeout=PLACE_S)
        except ray.exceptions.RayError as error:
            raise RollmillError(f"{run.path} was not started: {str(error).strip()[-600:]}") from None

    def collect(self, run: RunDirectory) -> str | None:
        objects = Objects.open(run.home_store)
        where = Presence(objects).where()
        bring(objects, run.path)  # after it: a supervisor sends the last lines before it leaves
        return where

    def halt(self, run: RunDirectory) -> None:
        Presence(Objects.open(run.home_store)).ask_to_stop()


def _connect(config: RayConfig) -> Any:
    """The module `ray`, connected to the cluster."""
    try:
        import ray
    except ImportError:
        raise ConfigError('[cluster] kind = "ray" needs Ray', hint="pip install 'rollmill[ray]'") from None
    if ray.is_initialized():
        return ray
    hint = "`ray start --head` makes a cluster of this host, `ray start --address=HOST:PORT` lets it join one"
    host, _, port = config.address.rpartition(":")
    try:
        if config.address != "auto":
            socket.create_connection((host, int(port)), CONNECT_S).close()
        named = {"_node_ip_address": os.environ[NODE]} if NODE in os.environ else {}
        if not named:
            _probe(config.address)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        ray.init(config.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **named)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray would end the process at once
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"[cluster] address = {config.address!r} cannot be used: {error}", hint=hint) from None
    return ray


def _probe(address: str) -> None:
    """Connect in another process first: on a host that is no node of the cluster, Ray aborts the process."""
    script = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"
    try:
        done = subprocess.run([sys.executable, "-P", "-c", script, address], capture_output=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        raise ConnectionError(f"no answer after {PROBE_S:.0f} s") from None
    if done.returncode < 0:
        raise ConnectionError("this host is no node of that cluster")
    if done.returncode > 0:
        raise ConnectionError(done.stderr.decode(errors="replace").strip().splitlines()[-1][-300:])


def _check_room(ray: Any, config: RunConfig) -> None:
    """Raises ConfigError if the cluster lacks GPUs or a region."""
    resources, specs = ray.cluster_resources(), config.engine_specs
    ranks = max((stage.training.ranks for stage in config.stages), default=0)
    needed = ranks + sum(_engine_gpus(spec.section.gpus) for spec in specs)
    demanded = config.device == "cuda" or any(spec.section.gpus for spec in specs)
    if (resources.get("GPU") or demanded) and config.device != "cpu" and needed > resources.get("GPU", 0):
        raise ConfigError(
            f"the run needs {needed} GPUs ({ranks} for the trainer), but the cluster has {resources.get('GPU', 0):.0f}",
            hint="add nodes, or lower `ranks` of the stages or `count` or `gpus` of [[engines]]",
        )
    found = _regions(ray)
    missing = [region for region in config.regions if found and region not in found]
    if missing:
        raise ConfigError(
            f"no Ray node has the label {REGION}={missing[0]}",
            hint=f"nodes have {', '.join(sorted(found))}; `ray start --labels {REGION}={missing[0]}` adds one",
        )


def _engine_gpus(gpus: int | None) -> int:
    return 1 if gpus is None else gpus


def _regions(ray: Any) -> set[str]:
    """The regions that living nodes are labelled with."""
    return {node["Labels"][REGION] for node in ray.nodes() if node["Alive"] and REGION in node["Labels"]}


def _options(run: RunDirectory, name: str) -> dict[str, Any]:
    """Of an actor that Ray keeps alive whoever leaves."""
    return {"name": f"{run.id}/{name}", "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1}


@dataclass
class PlacedKeeper:
    """A keeper as the supervisor sees it."""

    actor: Any
    asked: Any = None  # a question that it has not answered yet


@dataclass
class RoleActors:
    """The keepers of a role: one, or one per rank. All ranks start and end together."""

    name: str
    arguments: tuple[str, ...]
    threads: int
    service: bool
    ranks: int
    doing: str
    keepers: list[PlacedKeeper] = field(default_factory=list)
    group: Any = None  # the placement group of several ranks
    started_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(0.2, 3.0))  # counts the restarts
    ended: bool = False


class RayLauncher:
    def __init__(self, run: RunDirectory, config: RayConfig, ray: Any) -> None:
        self._run = replace(run, ports={})  # every process takes a free port of its node
        self._config, self._ray = config, ray
        self._roles: dict[str, RoleActors] = {}
        self._regions = _regions(ray)
        self._looked = 0.0

    def start(self, role: str, *arguments: str, threads: int = 1, service: bool = False, ranks: int = 1) -> None:
        """Start a role, or take it over if an earlier supervisor of the run started it and it still runs."""
        tree = {**self._run.config.model_dump(mode="json"), "engines": None}  # their number may change meanwhile
        doing = hashlib.sha256(json.dumps([role, arguments, threads, ranks, tree]).encode()).hexdigest()
        started = RoleActors(role, arguments, threads, service, ranks, doing)
        self._roles[role] = started
        self._place(started)
        self._begin(started, again=False)

    def rescale(self, run: RunDirectory) -> None:
        _check_room(self._ray, run.config)
        wanted = {spec.role for spec in run.config.engine_specs}
        for role in [role for role in self._roles if role.startswith("engine-") and role not in wanted]:
            self._end([self._roles.pop(role)])
        for name in self._named():
            if name.startswith("engine-") and name not in wanted:
                self._kill_named(name)  # an earlier supervisor started it
        self._run = replace(run, ports={})

    def running(self) -> list[str]:
        return [name for name, role in self._roles.items() if not role.ended]

    def ended(self, role: str) -> bool:
        return self._roles[role].ended

    def watch(self) -> None:
        """Look at every role: mark those that are done, restart those that died. Does not wait for nodes that do not
        answer: Ray decides whether they are lost."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        for role in self._roles.values():
            if not role.ended:
                self._look(role)

    def _look(self, role: RoleActors) -> None:
        answers = [self._answer(role, keeper) for keeper in role.keepers]
        lost = [rank for rank, answer in enumerate(answers) if answer and answer[0] != role.doing]
        codes = [answer[1] if answer and answer[0] == role.doing else None for answer in answers]
        failed = [rank for rank, code in enumerate(codes) if code is not None and (code != 0 or role.service)]
        if failed:
            final = [rank for rank in failed if codes[rank] == FINAL]
            rank = (final or failed)[0]
            code, answer = codes[rank], answers[rank]
            assert code is not None and answer is not None
            self._restart(role, rank, code, answer[2])
        elif lost:
            telemetry.emit("restart", target=role.name, exit_code=-signal.SIGKILL, restarts=role.backoff.failures)
            self._begin(role, again=role.ranks > 1)
        elif all(code == 0 for code in codes):
            role.ended = True

    def _answer(self, role: RoleActors, keeper: PlacedKeeper) -> tuple[str | None, int | None, str] | None:
        """What a keeper answers to `poll`; None if it has not answered yet."""
        if keeper.asked is None:
            keeper.asked = keeper.actor.poll.remote()
        if not self._ray.wait([keeper.asked], timeout=0.0)[0]:
            return None
        asked, keeper.asked = keeper.asked, None
        try:
            answer: tuple[str | None, int | None, str] = self._ray.get(asked)
            return answer
        except self._ray.exceptions.ActorDiedError:  # somebody has killed it: Ray does not bring it back
            self._place(role)
            self._begin(role, again=False)
        except self._ray.exceptions.RayError:
            pass  # its node is lost or cut off: Ray brings it back
        return None

    def _restart(self, role: RoleActors, rank: int, code: int, words: str) -> None:
        if time.monotonic() - role.started_at > STEADY_S:
            role.backoff.reset()
        if code == FINAL or role.backoff.failures >= MAX_RESTARTS:
            name = rank_name(role.name, rank)
            raise RollmillError(
                f"process {name!r} {describe_exit(code)}: {words}",
                hint=f"`rollmill logs RUN {name}` shows the rest; once it is fixed, `rollmill train --resume RUN`",
            )
        pause = role.backoff.failed()
        telemetry.emit("restart", target=role.name, exit_code=code, restarts=role.backoff.failures)
        time.sleep(pause)
        self._begin(role, again=True)

    def _place(self, role: RoleActors) -> None:
        """Ask Ray for the keepers of a role: ranks near each other, engines far from each other."""
        kind, selector = role.name.partition("-")[0], self._selector(role.name)
        needs = self._needs(role)
        strategy: Any = "SPREAD" if kind == "engine" else "DEFAULT"
        if role.ranks > 1:
            role.group = self._group(role, needs, selector)
        role.keepers = []
        for rank in range(role.ranks):
            name = rank_name(role.name, rank)
            if role.group is not None:
                strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    role.group, placement_group_bundle_index=rank
                )
            options = {**_options(self._run, name), **needs, "get_if_exists": True, "scheduling_strategy": strategy}
            if selector and role.group is None:
                options["label_selector"] = selector
            keeper = self._ray.remote(Keeper).options(**options)
            actor = keeper.remote(self._run.id, str(self._run.home_store), name, self._config.scratch, node_address)
            role.keepers.append(PlacedKeeper(actor))

    def _group(self, role: RoleActors, needs: dict[str, float], selector: dict[str, str]) -> Any:
        util, name = self._ray.util, f"{self._run.id}/{role.name}"
        with contextlib.suppress(ValueError):
            return util.get_placement_group(name)
        bundle = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"]}
        bundles = [{resource: amount for resource, amount in bundle.items() if amount} for _ in range(role.ranks)]
        selectors = [selector] * role.ranks if selector else None
        return util.placement_group(bundles, "PACK", name, lifetime="detached", bundle_label_selector=selectors)

    def _needs(self, role: RoleActors) -> dict[str, float]:
        """CPUs and GPUs of each of its processes."""
        config, kind = self._run.config, role.name.partition("-")[0]
        gpus = 0
        if config.device != "cpu" and self._ray.cluster_resources().get("GPU"):
            if kind == "engine":
                gpus = _engine_gpus(config.engine_spec(role.name.partition("-")[2]).section.gpus)
            elif kind == "trainer" and role.arguments:  # without a stage it only imports
                gpus = 1
        return {"num_cpus": 1 if gpus else role.threads, "num_gpus": gpus}

    def _selector(self, role: str) -> dict[str, str]:
        config, (kind, _, name) = self._run.config, role.partition("-")
        region = config.engine_spec(name).region if kind == "engine" else config.regions[0]
        asked = self._config.labels.get(f"engine-{region}" if kind == "engine" else kind, {})
        return {**({REGION: region} if self._regions else {}), **asked}

    def _begin(self, role: RoleActors, *, again: bool) -> None:
        role.started_at = time.monotonic()
        handed = hand_to(self._run, role.name)
        places_ = self._meet(role) if role.ranks > 1 else [{}]
        if again and role.ranks > 1:
            self._wait([keeper.actor.end.remote(0.0) for keeper in role.keepers], STOP_PATIENCE_S)
        for keeper, place in zip(role.keepers, places_, strict=True):
            environment = {"OMP_NUM_THREADS": str(role.threads), **place}
            keeper.asked = None  # an answer from before counts no more
            keeper.actor.begin.remote(role.doing, role.name, handed, role.arguments, environment, again)

    def _meet(self, role: RoleActors) -> list[dict[str, str]]:
        try:
            host, port = self._ray.get(role.keepers[0].actor.meeting.remote(), timeout=PLACE_S)
        except self._ray.exceptions.RayError as error:
            raise RollmillError(
                f"{role.name} got no place in the cluster: {str(error).strip()[-300:]}",
                hint=f"it needs {role.ranks} places at once; `ray status` shows what is free",
            ) from None
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # Ray shows each actor its own GPU only
        return [{**place, **alone} for place in places(role.ranks, host, port)]

    def stop(self) -> None:
        self.stop_roles()
        self._ray.shutdown()

    def stop_roles(self) -> None:
        self._end(list(self._roles.values()))
        self._roles.clear()
        for name in self._named():  # what an earlier supervisor started
            self._kill_named(name)
        with contextlib.suppress(ValueError):  # and the places of its ranks
            util = self._ray.util
            util.remove_placement_group(util.get_placement_group(f"{self._run.id}/trainer"))

    def _end(self, roles: Sequence[RoleActors]) -> None:
        actors = [keeper.actor for role in roles for keeper in role.keepers]
        self._wait([actor.end.remote() for actor in actors], 2 * STOP_PATIENCE_S)
        for actor in actors:
            self._ray.kill(actor)
        for role in roles:
            if role.group is not None:
                self._ray.util.remove_placement_group(role.group)

    def _wait(self, refs: list[Any], timeout: float) -> None:
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=timeout)

    def _named(self) -> list[str]:
        """The roles of this run that Ray has keepers of."""
        prefix = f"{self._run.id}/"
        names = [name.removeprefix(prefix) for name in self._ray.util.list_named_actors() if name.startswith(prefix)]
        return [name for name in names if name != "supervisor"]

    def _kill_named(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            self._ray.kill(self._ray.get_actor(f"{self._run.id}/{name}", NAMESPACE))


def node_address() -> str:
    """Of the node that this actor is on."""
    import ray

    return str(ray.util.get_node_ip_address())


def cluster_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def leave() -> None:
    """End this actor. Ray does not restart it."""
    import ray

    ray.kill(ray.get_runtime_context().current_actor)
