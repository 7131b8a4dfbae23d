"""A supervisor on a node of a cluster, and the roles that it watches. No Ray is needed: a node is its address."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill import telemetry
from rollmill.cluster.handed import hand_to
from rollmill.cluster.launcher import MAX_RESTARTS
from rollmill.cluster.launchers import ray_roles
from rollmill.cluster.launchers.ray_roles import RayLauncher
from rollmill.cluster.launchers.supervisor import Supervisor
from rollmill.cluster.presence import Presence
from rollmill.cluster.run import RunDirectory
from rollmill.errors import RollmillError
from rollmill.storage.objects import Objects

# the start of Python takes until somebody sends SIGTERM: the signal comes while the process imports
SLOW = """
import signal, time
if "rollmill.cluster.launchers.supervisor" in " ".join(__import__("sys").orig_argv):
    while signal.SIGTERM not in signal.sigpending():
        time.sleep(0.02)
"""


def test_a_stop_that_comes_while_the_supervisor_starts_is_not_lost(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "slow"), os.getcwd()]))
    there = replace(run, path=tmp_path / "nodes" / run.id)  # its directory on the node
    presence, left = Presence(Objects.open(there.home_store)), threading.Event()
    presence.ask_to_stop()
    Supervisor(hand_to(run, "supervisor"), str(tmp_path / "nodes"), lambda: "127.0.0.1", lambda: "", left.set)
    assert presence.where() is not None
    assert left.wait(60), (there.logs / "supervisor.log").read_text()
    assert presence.where() is None and not presence.asked_to_stop()
    assert "the run is driven from node 127.0.0.1" in (there.logs / "supervisor.log").read_text()
    assert not list(there.logs.glob("trainer*")), "it was stopped before it started anything"


class StandInRay:
    """Ray with one actor per name. `answers`: what its keepers answer to each `poll`; an exception is raised."""

    class exceptions:
        class RayError(Exception): ...

        class ActorDiedError(RayError): ...

    def __init__(self, *answers: Any, named: list[str]) -> None:
        self.answers, self.named, self.begun = list(answers), named, 0
        self.util = self.poll = self.begin = self

    def nodes(self) -> list[Any]:
        return []

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8}

    def list_named_actors(self) -> list[str]:
        return self.named

    def options(self, **_: Any) -> StandInRay:
        return self

    def remote(self, *arguments: Any) -> StandInRay:
        self.begun += len(arguments) == 6  # `begin` has six
        return self

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return refs, []

    def get(self, ref: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def watched(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Callable[[StandInRay], list[dict[str, Any]]]:
    """Starts the gateway with this Ray, watches it until all answers are read, and returns the restarts."""
    monkeypatch.setattr(ray_roles.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(ray_roles, "LOOK_S", 0.0)
    telemetry.open_events(run.events, "supervisor")

    def watch(ray: StandInRay) -> list[dict[str, Any]]:
        launcher = RayLauncher(run, ray, "/nowhere", {})
        launcher.start("gateway", service=True)
        while ray.answers:
            launcher.watch()
        return [event for event in telemetry.read_events(run.events) if event["kind"] == "restart"]

    return watch


def test_a_keeper_that_cannot_start_ends_the_run_and_says_why(watched: Any, run: RunDirectory) -> None:
    died = StandInRay.exceptions.ActorDiedError("PermissionError: '/nowhere'")
    ray = StandInRay(*[died] * (MAX_RESTARTS + 1), named=[])
    with pytest.raises(RollmillError, match="'gateway' has no keeper: PermissionError: '/nowhere'"):
        watched(ray)
    assert ray.begun == 1 + MAX_RESTARTS
    unavailable = StandInRay.exceptions.RayError("its node is lost")  # Ray brings it back, however long that takes
    assert len(watched(StandInRay(*[unavailable] * 20, named=[]))) == MAX_RESTARTS


def test_a_role_lost_together_with_its_supervisor_is_recorded_as_restarted(watched: Any, run: RunDirectory) -> None:
    ray = StandInRay((None, None, ""), named=[f"{run.id}/gateway", f"{run.id}/supervisor"])
    assert [event["target"] for event in watched(ray)] == ["gateway"] and ray.begun == 1
