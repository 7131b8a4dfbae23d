"""How many engines a run has: asked for in its store, kept by its supervisor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollmill.cluster import scale
from rollmill.cluster.run import RunDirectory
from rollmill.cluster.scale import Engines, ask_scale, read_scale, scaled
from rollmill.errors import ConfigError


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
    engines = Engines(run, launcher, ("line", "rl", "bf16"))  # type: ignore[arg-type]
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
    Engines(run, again, ("line", "rl", "bf16")).adjust()  # type: ignore[arg-type]
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
