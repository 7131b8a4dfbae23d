"""The roles of a run as its supervisor sees them on Ray: asks Ray for an actor per process, and watches the actors.

actor not there        its node is lost: Ray starts it again on another node, without its process
actor without process  `watch` starts the process there
process has ended       `watch` starts it again, as on one host
actor died for good    somebody killed it, or it could not start: `watch` asks Ray for another one
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill import telemetry
from rollmill.errors import RollmillError
from rollmill.launch.launcher import FINAL, Role
from rollmill.launch.launchers.node_process import NodeProcess
from rollmill.launch.launchers.ray_cluster import (
    NAMESPACE,
    REGION,
    actor_options,
    check_room,
    engine_gpus,
    node_address,
    regions_of,
)
from rollmill.launch.rank_processes import places, rank_name
from rollmill.launch.role_inputs import hand_to
from rollmill.runs.exits import STOP_PATIENCE_S, describe_exit
from rollmill.runs.run import RunDirectory

LOOK_S = 0.5  # between two looks at all actors
PLACE_S = 600.0  # for a supervisor, or the ranks of a trainer, to get their places
Answer = tuple[str | None, int | None, str]  # of `NodeProcess.poll`


@dataclass
class ProcessHandle:
    """An actor as the supervisor sees it."""

    actor: Any
    asked: Any = None  # a question that it has not answered yet
    answer: Answer | None = None  # the newest one since its process was begun; None: it cannot be reached, or not yet


@dataclass
class RayRole(Role):
    doing: str = ""  # digest of what it is started with
    handles: list[ProcessHandle] = field(default_factory=list)  # of its actors, one per rank
    group: Any = None  # the placement group of several ranks


class RayLauncher:
    def __init__(self, run: RunDirectory, ray: Any, scratch: str, labels: Mapping[str, Mapping[str, str]]) -> None:
        self._run = replace(run, ports={})  # every process takes a free port of its node
        self._ray, self._scratch, self._labels = ray, scratch, labels
        self._roles: dict[str, RayRole] = {}
        self._regions = regions_of(ray)
        self._earlier = set(self._named())  # actors that an earlier supervisor of the run left
        self._looked = 0.0

    def start(self, role: str, *arguments: str, threads: int = 1, service: bool = False, ranks: int = 1) -> None:
        """Start a role, or take it over if an earlier supervisor of the run started it: then `watch` finds out whether
        it still runs. If not, its start is a restart, and recorded."""
        tree = {**self._run.config.model_dump(mode="json"), "engines": None}  # their number may change meanwhile
        doing = hashlib.sha256(json.dumps([role, arguments, threads, ranks, tree]).encode()).hexdigest()
        started = RayRole(role, arguments, threads, service, ranks, time.monotonic(), doing=doing)
        self._roles[role] = started
        self._place(started)
        if role in self._earlier:
            self._earlier.remove(role)
        else:
            self._begin(started, again=False)

    def rescale(self, run: RunDirectory) -> None:
        check_room(self._ray, run.config)
        wanted = {spec.role for spec in run.config.engine_specs}
        for role in [role for role in self._roles if role.startswith("engine-") and role not in wanted]:
            self._end([self._roles.pop(role)])
        for name in self._named():
            if name.startswith("engine-") and name not in wanted:
                self._kill_named(name)  # an earlier supervisor started it
                self._earlier.discard(name)
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

    def _look(self, role: RayRole) -> None:
        try:
            answers = [answer for handle in role.handles if (answer := self._answer(handle)) is not None]
        except self._ray.exceptions.ActorDiedError as error:
            self._count(role, f"{role.name!r} has no actor", str(error), -signal.SIGKILL)
            self._place(role)
            self._begin(role, again=role.ranks > 1)
            return
        if len(answers) < role.ranks:
            return  # a node may be lost: ranks that exit because of it begin again when its actor is back
        codes = [code for _, code, _ in answers]
        failed = [rank for rank, code in enumerate(codes) if code is not None and (code != 0 or role.service)]
        if any(doing != role.doing for doing, _, _ in answers):  # an actor has come back without its process
            if self._begin(role, again=role.ranks > 1):
                telemetry.emit("restart", target=role.name, exit_code=-signal.SIGKILL, restarts=role.backoff.failures)
        elif failed:
            final = [rank for rank in failed if codes[rank] == FINAL]
            rank = (final or failed)[0]
            _, code, words = answers[rank]
            assert code is not None
            self._count(role, f"process {rank_name(role.name, rank)!r} {describe_exit(code)}", words, code)
            self._begin(role, again=True)
        elif all(code == 0 for code in codes):
            role.ended = True

    def _answer(self, handle: ProcessHandle) -> Answer | None:
        """The newest answer of an actor to `poll`, which it may have given at an earlier look. Raises Ray's
        ActorDiedError if Ray does not bring it back."""
        if handle.asked is None:
            handle.asked = handle.actor.poll.remote()
        if self._ray.wait([handle.asked], timeout=0.0)[0]:
            asked, handle.asked = handle.asked, None
            try:
                handle.answer = self._ray.get(asked)
            except self._ray.exceptions.ActorDiedError:
                raise
            except self._ray.exceptions.RayError:  # its node is lost or cut off: Ray brings it back
                handle.answer = None
        return handle.answer

    def _count(self, role: RayRole, what: str, why: str, code: int) -> None:
        """One more restart of a role, after a pause. Raises RollmillError if there were too many."""
        if not role.may_restart(code):
            raise RollmillError(
                f"{what}: {why.strip()[-600:]}",
                hint=f"`rollmill logs RUN {role.name}` shows the rest; once it is fixed, `rollmill train --resume RUN`",
            )
        role.wait_for_restart(code)

    def _place(self, role: RayRole) -> None:
        """Ask Ray for the actors of a role: ranks near each other, engines far from each other."""
        selector, needs = self._selector(role.name), self._needs(role)
        strategy: Any = "SPREAD" if "-" in role.name else "DEFAULT"  # engines, and all but the first of other roles
        if role.ranks > 1:
            role.group = self._group(role, needs, selector)
        role.handles = []
        for rank in range(role.ranks):
            name = rank_name(role.name, rank)
            if role.group is not None:
                strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    role.group, placement_group_bundle_index=rank
                )
            options = {**actor_options(self._run, name), **needs, "scheduling_strategy": strategy}
            if selector and role.group is None:
                options["label_selector"] = selector
            remote = self._ray.remote(NodeProcess).options(**options, get_if_exists=True)
            actor = remote.remote(self._run.id, str(self._run.home_store), name, self._scratch, node_address)
            role.handles.append(ProcessHandle(actor))

    def _group(self, role: RayRole, needs: dict[str, float], selector: dict[str, str]) -> Any:
        util, name = self._ray.util, f"{self._run.id}/{role.name}"
        with contextlib.suppress(ValueError):
            return util.get_placement_group(name)
        bundle = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"]}
        bundles = [{resource: amount for resource, amount in bundle.items() if amount} for _ in range(role.ranks)]
        selectors = [selector] * role.ranks if selector else None
        return util.placement_group(bundles, "PACK", name, lifetime="detached", bundle_label_selector=selectors)

    def _needs(self, role: RayRole) -> dict[str, float]:
        """CPUs and GPUs of each of its processes."""
        config, kind = self._run.config, role.name.partition("-")[0]
        gpus = 0
        if config.device != "cpu" and self._ray.cluster_resources().get("GPU"):
            if kind == "engine":
                gpus = engine_gpus(config.engine_spec(role.name.partition("-")[2]).section.gpus)
            elif kind == "trainer" and role.arguments:  # without a stage it only imports
                gpus = 1
        return {"num_cpus": 1 if gpus else role.threads, "num_gpus": gpus}

    def _selector(self, role: str) -> dict[str, str]:
        config, (kind, _, name) = self._run.config, role.partition("-")
        region, own = config.regions[0], dict[str, str]()
        if kind == "engine":
            table = config.engine_spec(name).section
            region, kind, own = table.region, f"engine-{table.region}", table.labels
        return {**({REGION: region} if self._regions else {}), **self._labels.get(kind, {}), **own}

    def _begin(self, role: RayRole, *, again: bool) -> bool:
        """Start the processes of a role. Returns False if an actor cannot be reached now: then `watch` tries again."""
        role.started_at = time.monotonic()
        for handle in role.handles:
            handle.asked = handle.answer = None  # an answer from before counts no more
        handed = hand_to(self._run, role.name)
        places_ = self._meet(role) if role.ranks > 1 else [{}]
        if places_ is None:
            return False
        if again and role.ranks > 1:
            self._wait([handle.actor.end.remote(0.0) for handle in role.handles], STOP_PATIENCE_S)
        for handle, place in zip(role.handles, places_, strict=True):
            environment = {"OMP_NUM_THREADS": str(role.threads), **place}
            handle.actor.begin.remote(role.doing, role.name, handed, role.arguments, environment, again)
        return True

    def _meet(self, role: RayRole) -> list[dict[str, str]] | None:
        """The environment of each rank; None if the actor of the first one is lost, until Ray brings it back."""
        try:
            host, port = self._ray.get(role.handles[0].actor.meeting.remote(), timeout=PLACE_S)
        except self._ray.exceptions.GetTimeoutError as error:
            raise RollmillError(
                f"{role.name} got no place in the cluster: {str(error).strip()[-300:]}",
                hint=f"it needs {role.ranks} places at once; `ray status` shows what is free",
            ) from None
        except self._ray.exceptions.RayError:
            return None
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # Ray shows each actor its own GPU only
        return [{**place, **alone} for place in places(role.ranks, host, port)]

    def stop(self) -> None:
        self.stop_roles()
        self._ray.shutdown()

    def stop_roles(self) -> None:
        self._end(list(self._roles.values()))
        self._roles.clear()
        self._earlier.clear()
        for name in self._named():  # what an earlier supervisor started
            self._kill_named(name)
        with contextlib.suppress(ValueError):  # and the places of its ranks
            util = self._ray.util
            util.remove_placement_group(util.get_placement_group(f"{self._run.id}/trainer"))

    def _end(self, roles: Sequence[RayRole]) -> None:
        actors = [handle.actor for role in roles for handle in role.handles]
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
        """The roles of this run that Ray has actors of."""
        prefix = f"{self._run.id}/"
        names = [name.removeprefix(prefix) for name in self._ray.util.list_named_actors() if name.startswith(prefix)]
        return [name for name in names if name != "supervisor"]

    def _kill_named(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            self._ray.kill(self._ray.get_actor(f"{self._run.id}/{name}", NAMESPACE))
