"""A supervisor on a node of a cluster, and the roles that it watches. No Ray is needed: a node is its address."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill import telemetry
from rollmill.errors import RollmillError
from rollmill.launch.launcher import MAX_RESTARTS
from rollmill.launch.launchers import ray_roles
from rollmill.launch.launchers.ray_roles import RayLauncher
from rollmill.launch.launchers.supervisor import Supervisor
from rollmill.launch.role_inputs import hand_to
from rollmill.runs.run import RunDirectory
from rollmill.runs.shared.presence import Presence
from rollmill.storage.objects import Objects

# the start of Python takes until somebody sends SIGTERM: the signal comes while the process imports
SLOW = """
import signal, time
if "rollmill.launch.supervise" in " ".join(__import__("sys").orig_argv):
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


LATE = object()


class StandInRay:
    """Ray with one actor per name. `answers`: what its actors answer to each `poll`, and to `meeting`; an exception is
    raised, and after LATE it comes at the next look. `placed`: what Ray was asked for, by actor or placement group. It
    has a node in each of `regions`."""

    class exceptions:
        class RayError(Exception): ...

        class ActorDiedError(RayError): ...

        class GetTimeoutError(RayError): ...

    def __init__(self, *answers: Any, named: list[str], regions: Sequence[str] = (), gpus: int = 0) -> None:
        self.answers, self.named, self.begun = list(answers), named, 0
        self.util = self.poll = self.begin = self.end = self.meeting = self.scheduling_strategies = self
        self.placed: dict[str, Any] = {}
        self._regions, self._gpus = regions, gpus

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Labels": {"region": region}} for region in self._regions]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8, "GPU": self._gpus}

    def list_named_actors(self) -> list[str]:
        return self.named

    def options(self, **options: Any) -> StandInRay:
        self.placed[options["name"].partition("/")[2]] = options
        return self

    def get_placement_group(self, name: str) -> Any:
        raise ValueError(name)

    def placement_group(self, bundles: list[Any], strategy: str, name: str, **options: Any) -> str:
        self.placed[name] = {"bundles": bundles, "strategy": strategy, **options}
        return name

    def PlacementGroupSchedulingStrategy(self, group: str, placement_group_bundle_index: int) -> tuple[str, int]:
        return group, placement_group_bundle_index

    def remote(self, *arguments: Any) -> StandInRay:
        self.begun += len(arguments) == 6  # `begin` has six
        return self

    def wait(self, refs: list[Any], timeout: float, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
        if self.answers[:1] == [LATE]:
            self.answers.pop(0)
            return [], refs
        return refs, []

    def get(self, ref: Any, timeout: float | None = None) -> Any:
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


def test_a_node_process_that_cannot_start_ends_the_run_and_says_why(watched: Any, run: RunDirectory) -> None:
    died = StandInRay.exceptions.ActorDiedError("PermissionError: '/nowhere'")
    ray = StandInRay(*[died] * (MAX_RESTARTS + 1), named=[])
    with pytest.raises(RollmillError, match="'gateway' has no actor: PermissionError: '/nowhere'"):
        watched(ray)
    assert ray.begun == 1 + MAX_RESTARTS
    unavailable = StandInRay.exceptions.RayError("its node is lost")  # Ray brings it back, however long that takes
    assert len(watched(StandInRay(*[unavailable] * 20, named=[]))) == MAX_RESTARTS


def test_a_role_lost_together_with_its_supervisor_is_recorded_as_restarted(watched: Any, run: RunDirectory) -> None:
    ray = StandInRay((None, None, ""), named=[f"{run.id}/gateway", f"{run.id}/supervisor"])
    assert [event["target"] for event in watched(ray)] == ["gateway"] and ray.begun == 1


LABELS = {"trainer": {"accelerator": "h200"}, "engine-away": {"disk": "fast"}, "gateway": {"region": "edge"}}


def test_roles_are_placed_by_region_and_label_and_engines_far_from_each_other(
    make_run: Callable[..., RunDirectory],
) -> None:
    engines = "engines=[{},{region='away'},{region='away',labels={disk='local',accelerator='h100'}}]"
    run = make_run(engines, "gateway.replicas=2")

    def place(ray: StandInRay, labels: dict[str, dict[str, str]]) -> dict[str, Any]:
        launcher = RayLauncher(run, ray, "/nowhere", labels)
        for role in ("gateway", "gateway-2", "dispatcher", "engine-home", "engine-away", "engine-away-2"):
            launcher.start(role, service=True)
        launcher.start("trainer", "rl", threads=3)
        return {role: (each.get("label_selector"), each["scheduling_strategy"]) for role, each in ray.placed.items()}

    assert place(StandInRay(named=[], regions=("home", "away", "edge")), LABELS) == {
        "gateway": ({"region": "edge"}, "DEFAULT"),
        "gateway-2": ({"region": "edge"}, "SPREAD"),
        "dispatcher": ({"region": "home"}, "DEFAULT"),
        "engine-home": ({"region": "home"}, "SPREAD"),
        "engine-away": ({"region": "away", "disk": "fast"}, "SPREAD"),
        "engine-away-2": ({"region": "away", "disk": "local", "accelerator": "h100"}, "SPREAD"),
        "trainer": ({"region": "home", "accelerator": "h200"}, "DEFAULT"),
    }
    alike = place(StandInRay(named=[]), {})  # nodes without the label `region`
    assert alike.pop("engine-away-2") == ({"disk": "local", "accelerator": "h100"}, "SPREAD")
    assert {selector for selector, _ in alike.values()} == {None} and alike["engine-home"][1] == "SPREAD"


@pytest.mark.parametrize(("gpus", "bundle"), [(0, {"CPU": 3}), (4, {"CPU": 1, "GPU": 1})])
def test_ranks_are_placed_together(make_run: Callable[..., RunDirectory], gpus: int, bundle: dict[str, int]) -> None:
    run = make_run("device=auto", "stages.rl.training.ranks=2")
    ray = StandInRay(("10.0.0.7", 1234), named=[], regions=("home",), gpus=gpus)
    RayLauncher(run, ray, "/nowhere", LABELS).start("trainer", "rl", threads=3, ranks=2)
    selector = {"region": "home", "accelerator": "h200"}
    group = f"{run.id}/trainer"
    assert ray.placed.pop(group) == {
        "bundles": [bundle] * 2,
        "strategy": "PACK",
        "lifetime": "detached",
        "bundle_label_selector": [selector] * 2,
    }
    places = [(each["scheduling_strategy"], each["num_cpus"], each["num_gpus"]) for each in ray.placed.values()]
    assert places == [((group, rank), bundle["CPU"], bundle.get("GPU", 0)) for rank in range(2)]
    assert not any("label_selector" in each for each in ray.placed.values()) and ray.begun == 2


def test_ranks_that_lose_a_node_begin_again_together(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_roles, "LOOK_S", 0.0)
    run = make_run("stages.rl.training.ranks=2")
    telemetry.open_events(run.events, "supervisor")
    meeting = ("10.0.0.7", 1234)
    ray = StandInRay(meeting, named=[])
    launcher = RayLauncher(run, ray, "/nowhere", {})
    launcher.start("trainer", "rl", ranks=2)
    doing = launcher._roles["trainer"].doing
    lost, runs, failed = StandInRay.exceptions.RayError("its node is lost"), (doing, None, ""), (doing, 1, "no peer")

    def look(*answers: Any) -> tuple[int, int]:
        """Both ranks answer. Returns how often processes were begun, and how many restarts are recorded."""
        ray.answers += answers
        launcher.watch()
        assert not ray.answers
        return ray.begun, len([each for each in telemetry.read_events(run.events) if each["kind"] == "restart"])

    assert look(runs, lost) == (2, 0)
    assert look(failed, lost) == (2, 0), "it failed because its peer is lost: no restart helps before that is back"
    assert look(failed, (None, None, ""), lost) == (2, 0), "the first actor is lost when it is asked where to meet"
    assert look(failed, (None, None, ""), meeting) == (4, 1)
    assert look(runs, runs) == (4, 1)
    # they end, and their answers come at different looks
    look((doing, 0, ""), LATE)
    assert not launcher.ended("trainer")
    look(LATE, (doing, 0, ""))
    assert launcher.ended("trainer") and ray.begun == 4


def test_ranks_without_a_place_say_so(make_run: Callable[..., RunDirectory]) -> None:
    ray = StandInRay(StandInRay.exceptions.GetTimeoutError("after 600 s"), named=[])
    with pytest.raises(RollmillError, match="trainer got no place in the cluster: after 600 s"):
        RayLauncher(make_run("stages.rl.training.ranks=2"), ray, "/nowhere", {}).start("trainer", "rl", ranks=2)
