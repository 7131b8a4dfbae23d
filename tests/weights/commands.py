"""`rollmill weights …`, called as the command line calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rollmill.cli.weights.weights_commands import app
from rollmill.storage.objects import Objects
from rollmill.weights import WeightStore


def invoke(*arguments: object, columns: int = 100) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def shown(*arguments: object, columns: int = 100) -> str:
    code, output = invoke(*arguments, columns=columns)
    assert code == 0, output
    return output


def open_store(run: Path) -> WeightStore:
    return WeightStore(Objects.open(run / "store"))


def write_events(run: Path) -> None:
    """The events that trainer, mirror and engines of a run write about two versions."""
    (run / "events").mkdir(exist_ok=True)
    lines: list[dict[str, Any]] = []
    for version in (1, 2):
        facts = {"line": "rl", "version": version, "at": 1000.0 * version}
        sizes = {"bytes": 100, "delta_bytes": 100, "full_bytes": 5000, "density": 0.01}
        lines.append({"kind": "publish", "process": "trainer", **facts, **sizes, "step": version, "seconds": 0.5})
        away = {"process": "mirror", "region": "away", "bytes": 90, "since_publish_seconds": 1.5}
        lines.append({"kind": "arrive", **facts, **away})
        engines = [("e0", "home", 0.25), ("e1", "away", 2.0)] if version == 1 else [("e0", "home", 0.25)]
        for engine, region, since in engines:
            place = {"engine": engine, "region": region, "since_publish_seconds": since, "pause_seconds": 0.004}
            lines.append({"kind": "apply", "process": engine, **facts, **place})
    for line in lines:
        with (run / "events" / f"{line['process']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
