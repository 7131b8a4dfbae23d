"""Sinks get the figures of a run, from its beginning, and cannot stop it. The guide to them, word by word."""

from __future__ import annotations

import json
import re
import struct
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from rollmill import telemetry
from rollmill.errors import ConfigError
from rollmill.runs.open_sinks import Sinks
from rollmill.runs.preflight import check_parts
from rollmill.runs.run import RunDirectory
from rollmill.runs.sink import Sink, scalars_of
from tests.cli.test_init import shell, shortened
from tests.later import Later
from tests.runs.conftest import make_config
from tests.test_repo import ROOT

GUIDE = (ROOT / "docs" / "guides" / "watching-a-run.md").read_text()
EVENTS: list[dict[str, Any]] = [
    {"kind": "document_step", "stage": "midtrain", "step": 3, "steps": 9, "loss": 1.5, "notes": {}, "at": 1.0},
    {"kind": "step", "stage": "rl", "step": 1, "version": 1, "reward_mean": 0.25, "solve_rate": None, "at": 2.0},
    {"kind": "heldout_loss", "stage": "midtrain", "source": "text", "step": 3, "loss": 2.0, "at": 3.0},
    {
        "kind": "eval",
        "split": "heldout",
        "mode": "sampled",
        "version": 7,
        "rate": 0.5,
        "low": 0.4,
        "high": 0.6,
        "at": 4.0,
    },
    {"kind": "publish", "line": "rl", "version": 7, "bytes": 10, "density": 0.1, "at": 5.0},
    {"kind": "engine", "tokens_per_s": 5.0, "at": 6.0},
    {"kind": "step", "stage": "rl", "step": "many", "reward_mean": 1.0, "at": 7.0},
]


def test_the_figures_of_events() -> None:
    found = [scalar for event in EVENTS for scalar in scalars_of(event)]
    assert {(each.tag, each.step, each.value) for each in found} == {
        ("midtrain/loss", 3, 1.5),
        ("rl/reward_mean", 1, 0.25),
        ("midtrain/heldout_loss/text", 3, 2.0),
        ("eval/heldout/sampled/rate", 7, 0.5),
        ("eval/heldout/sampled/low", 7, 0.4),
        ("eval/heldout/sampled/high", 7, 0.6),
        ("weights/rl/bytes", 7, 10.0),
        ("weights/rl/density", 7, 0.1),
    }


def read_figures(path: Path) -> list[tuple[str, int, float, float]]:
    """Tag, step, value and time of each figure in TensorBoard's file: records of length, checksum, event, checksum."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Later("tensorboardX.proto.event_pb2").Event.FromString(data[12 : 12 + length])
        found += [(each.tag, event.step, each.simple_value, event.wall_time) for each in event.summary.value]
        data = data[16 + length :]
    return found


def write_events(run: RunDirectory, events: list[dict[str, Any]]) -> None:
    run.events.mkdir(exist_ok=True)
    with (run.events / "trainer.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_a_continued_run_begins_anew(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, make_config('sinks=[{kind="tensorboard"}]'))
    write_events(run, EVENTS[:1])
    for more in (EVENTS[1:2], EVENTS[2:3]):
        sinks = Sinks(run)
        sinks.poll(now=True)
        write_events(run, more)
        sinks.close()
        (path,) = (run.path / "tensorboard").iterdir()
    assert read_figures(path) == [
        ("midtrain/loss", 3, 1.5, 1.0),
        ("rl/reward_mean", 1, 0.25, 2.0),
        ("midtrain/heldout_loss/text", 3, 2.0, 3.0),
    ]


def test_a_missing_package_is_told_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"tensorboardX cannot be imported") as refused:
        check_parts(make_config('sinks=[{kind="tensorboard"}]'))
    assert refused.value.hint == "pip install 'rollmill[tensorboard]'"


class Broken(Sink):
    def open(self, directory: Path, name: str) -> None: ...

    def write(self, scalars: object) -> None:
        raise ValueError("no disk")

    def close(self) -> None:
        raise AssertionError("it is closed already")


def test_a_sink_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_file", None)
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed, whatever this machine has
    settings = 'sinks=[{kind="tests.runs.test_sink:Broken"}, {kind="wandb"}, {kind="tensorboard"}]'
    run = RunDirectory.create(tmp_path, make_config(settings))
    telemetry.open_events(run.events, "supervisor")
    sinks = Sinks(run)
    write_events(run, EVENTS)
    sinks.poll(now=True)
    sinks.close()
    said = [event["text"] for event in telemetry.read_events(run.events) if event["kind"] == "warning"]
    assert "wandb cannot be imported" in said[0] and said[1].endswith("is closed: no disk") and len(said) == 2
    assert len(read_figures(next((run.path / "tensorboard").iterdir()))) == 8


def test_what_wandb_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, which is not installed here."""
    calls: list[tuple[str, Any]] = []

    class StandIn:
        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            calls.append((name, step_metric))

        def log(self, row: dict[str, float]) -> None:
            calls.append(("log", row))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**settings: Any) -> StandIn:
        calls.append(("init", settings["mode"]))
        return StandIn()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = RunDirectory.create(tmp_path, make_config('sinks=[{kind="wandb"}]'))
    write_events(run, [EVENTS[0], {**EVENTS[0], "step": 4}])
    Sinks(run).close()
    Sinks(run, fed=False).close()  # another process feeds them
    assert calls == [
        ("init", "offline"),
        ("midtrain/step", None),
        ("midtrain/*", "midtrain/step"),
        ("log", {"midtrain/loss": 1.5, "midtrain/step": 3}),
        ("log", {"midtrain/loss": 1.5, "midtrain/step": 4}),
        ("finish", None),
    ]


def test_the_real_wandb_offline(tmp_path: Path) -> None:
    """Where the package is installed. Seen with 0.31.0."""
    pytest.importorskip("wandb")
    run = RunDirectory.create(tmp_path, make_config('sinks=[{kind="wandb"}]'))
    write_events(run, [EVENTS[0], {**EVENTS[0], "step": 4}])
    Sinks(run).close()
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    assert data.count(b"midtrain/loss") >= 2 and b"midtrain/*" in data and b"1.5" in data


def test_the_guides_own_sink(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    (tmp_path / "mine.py").write_text(block)
    run = RunDirectory.create(tmp_path, make_config('sinks=[{kind="mine:Printer"}]', f'modules="{tmp_path}"'))
    write_events(run, EVENTS[:1])
    Sinks(run).close()
    Sinks(run, fed=False).close()  # another process feeds them
    assert (run.path / "figures.txt").read_text() == "midtrain/loss 3 1.5\n"


def guide_blocks() -> list[str]:
    found = re.findall(r"```bash\n(.*?)```", GUIDE.partition("## 3. ")[2], re.S)
    assert len(found) == 2, "a new block must be executed too"
    return found


def test_the_guides_settings_load(tmp_path: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", GUIDE, re.S):
        tree = tomllib.loads(block)
        config = make_config(*(f"evals.{name}={value!r}" for name, value in tree.get("evals", {}).items()))
        assert config.evals.every == tree.get("evals", {}).get("every", 0)
    printed = shell(guide_blocks()[0], tmp_path)
    assert "[[sinks]]" in printed and 'kind = "tensorboard"' in printed


@pytest.mark.slow
def test_the_guides_run_writes_figures(tmp_path: Path) -> None:
    settings, training = guide_blocks()
    printed = shell(settings + shortened(training), tmp_path)
    assert "events.out.tfevents" in printed, printed[-2000:]
    (path,) = (tmp_path / "my-watch" / "runs" / "my-run" / "tensorboard").iterdir()
    tags = {tag for tag, *_ in read_figures(path)}
    assert {"rl/reward_mean", "sft/loss", "eval/heldout/sampled/rate"} <= tags
