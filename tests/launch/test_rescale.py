"""How many engines a run has: asked for in its store, kept by its supervisor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollmill.errors import ConfigError
from rollmill.launch import rescale as scale
from rollmill.launch.devices import VARIABLE
from rollmill.launch.launchers.local import LocalLauncher, LocalRole
from rollmill.launch.rescale import Engines, ask_scale, read_scale, scaled
from rollmill.runs.run import RunDirectory
from rollmill.storage.objects import Objects
from rollmill.telemetry import open_events, read_events


class Recorded:
    """A launcher that only writes down what it is asked for."""

    def __init__(self) -> None:
        self.roles: list[str] = []

    def start(self, role: str, *arguments: str, threads: int = 1, service: bool = False, ranks: int = 1) -> None:
        assert service and arguments == ("line", "rl", "bf16")
        self.roles.append(role)

    def rescale(self, run: RunDirectory) -> None:
        self.roles = [role for role in self.roles if role in {spec.role for spec in run.config.engine_specs}]

    def running(self) -> list[str]:
        return self.roles


def test_engines_come_and_go_as_asked(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "LOOK_S", 0.0)
    launcher = Recorded()
    engines = Engines(run, launcher, ("line", "rl"))  # type: ignore[arg-type]
    engines.adjust()
    assert launcher.roles == ["engine-home", "engine-away"]
    assert ask_scale(run, ["engines=3", "away=2"]) == {"home": 3, "away": 2}
    engines.adjust()
    assert set(launcher.roles) == {
        "engine-home",
        "engine-home-2",
        "engine-home-3",
        "engine-away",
        "engine-away-2",
    }
    assert ask_scale(run, ["engines=1"]) == {"home": 1, "away": 2}
    engines.adjust()
    assert set(launcher.roles) == {"engine-home", "engine-away", "engine-away-2"}
    # it stays when the run is resumed
    again = Recorded()
    Engines(run, again, ("line", "rl")).adjust()  # type: ignore[arg-type]
    assert set(again.roles) == {"engine-home", "engine-away", "engine-away-2"}
    assert scaled(run, read_scale(run)).config.engine_spec("away-2").region == "away"


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("engines=0", "is no number of engines"),
        ("engines=many", "is no number of engines"),
        ("engines", "is no number of engines"),
        ("far=2", "'far' is no region of this run"),
    ],
)
def test_what_makes_no_sense_is_refused(make_run: Callable[..., RunDirectory], setting: str, complaint: str) -> None:
    run = make_run()
    with pytest.raises(ConfigError, match=complaint):
        ask_scale(run, [setting])
    assert read_scale(run) == {}


GPUS = ("device=auto", "engines=[{gpus=1}]")


class Unstarted(LocalLauncher):
    """A launcher on this machine that gives out GPUs, and starts nothing on them: only their names exist."""

    def _spawn(self, role: LocalRole) -> None:
        pass

    @property
    def gpus(self) -> dict[str, list[str]]:
        return {role: self._gpus[role] for role in self.running()}


def test_more_engines_than_gpus_are_refused(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "a,b,c")
    run = make_run(*GPUS)
    assert ask_scale(run, ["engines=2"]) == {"home": 2}
    with pytest.raises(ConfigError, match="needs 4 GPUs"):
        ask_scale(run, ["engines=3"])
    assert read_scale(run) == {"home": 2}
    monkeypatch.setenv(VARIABLE, "")  # as on a host that only reaches the store
    assert ask_scale(run, ["engines=3"]) == {"home": 3}


def test_a_run_goes_on_with_the_engines_it_has_room_for(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "a,b,c")
    monkeypatch.setattr(scale, "LOOK_S", 0.0)
    run = make_run(*GPUS)
    open_events(run.events, "supervisor")
    launcher = Unstarted(run)
    engines = Engines(run, launcher, ("line", "rl"))
    engines.adjust()
    ask_scale(run, ["engines=2"])
    engines.adjust()
    both = {"engine-home": ["b"], "engine-home-2": ["c"]}
    assert launcher.gpus == both
    Objects.open(run.home_store).put(scale.KEY, b'{"home": 3}')
    for _ in range(2):  # warned of once
        engines.adjust()
        assert launcher.gpus == both
    [warning] = [event["text"] for event in read_events(run.events) if event["kind"] == "warning"]
    assert "needs 4 GPUs" in warning
    # resumed, it has those of its configuration
    again = Unstarted(run)
    Engines(run, again, ("line", "rl")).adjust()
    assert again.gpus == {"engine-home": ["b"]}


@pytest.mark.parametrize("text", [b"[1]", b"7", b"null", b"{", b"\xff", b'{"home": true}', b'{"home": "2"}'])
def test_nonsense_in_the_store_is_no_number(run: RunDirectory, text: bytes) -> None:
    Objects.open(run.home_store).put(scale.KEY, text)
    assert read_scale(run) == {}
