"""Commands that update a region and print versions, once or until they are stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.errors import WeightsError
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Publisher, WeightStore
from tests.storage.serving import served
from tests.weights.build import history, same, train_step
from tests.weights.commands import invoke, open_store, shown, write_events


def test_mirror_brings_a_region_up_to_date(run: Path) -> None:
    shown("channel", "set", run, "live", "rl@2")
    with served(object_app(Objects.open(run / "store"), token="secret")) as url:
        command = "mirror", url, run / "away", "--line", "rl", "--channel", "live", "--token", "secret", "--once"
        output = shown(*command, "--region", "away", "--events", run / "events")
        assert "rl@4" in output
        assert "0 versions" in shown(*command)
    assert "rl@2" in shown("channel", "list", run / "away")
    assert same(WeightStore(Objects.open(run / "away")).load(Version("rl", 4)), history(5)[4])
    arrived = [json.loads(line) for line in shown("events", run, "--json").splitlines()]
    assert "away" in {region for row in arrived for region in row["regions"]}


def test_a_failed_mirror_reports_why(run: Path) -> None:
    code, output = invoke("mirror", "http://127.0.0.1:9", run / "away", "--line", "rl", "--once")
    assert code == 1 and "cannot be copied from" in output and "hint:" in output
    with pytest.raises(WeightsError, match="no line 'nope'"):
        invoke("mirror", run, run / "away", "--line", "nope", "--once")


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-c", "from rollmill.cli.main import main; main()", "weights", *map(str, arguments)]
    process = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background have it ignored
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_mirror_follows_until_it_is_stopped(run: Path) -> None:
    with started("mirror", run, run / "away", "--line", "rl") as process:
        assert process.stdout is not None
        assert "rl@4" in process.stdout.readline()
        publisher = Publisher(open_store(run), "rl")
        publisher.publish(5, train_step(history(5)[4], 5))
        assert "rl@5" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "3 versions" in process.stdout.read() and process.wait(20) == 0
    assert "all 3 versions verified" in shown("verify", run / "away")


def test_mirror_once_reports_its_head_and_missing_channels(run: Path) -> None:
    Publisher(open_store(run), "rl.2").publish(3, history(3)[2], Version("rl", 2))
    for copied in ("1 version,", "0 versions,"):
        output = shown("mirror", run, run / "away", "--line", "rl", "--once", "--channel", "live")
        assert f"rl.2: {copied}" in output and "at rl.2@3" in output and "there is no channel live to copy" in output
    shown("channel", "set", run, "live", "rl@1")
    assert "no channel" not in shown("mirror", run, run / "away", "--line", "rl", "--once", "--channel", "live")


# --- events


def test_events_are_one_object_per_version(run: Path) -> None:
    write_events(run)
    told = [json.loads(line) for line in shown("events", run, "--json").splitlines()]
    assert [row["version"] for row in told] == [1, 2] and told[0]["ratio"] == 50.0
    assert told[0]["regions"]["away"]["serving_seconds"] == 2.0
    output = shown("events", run)
    assert "rl@1" in output and "→ away" in output and "(1.5 s)" in output and "50.0×" in output
    with pytest.raises(WeightsError, match="has no events"):
        invoke("events", run / "store")


def test_events_follow(run: Path) -> None:
    write_events(run)
    with started("events", run, "--follow", "--json") as process:
        assert process.stdout is not None
        first = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [row["version"] for row in first] == [1, 2] and first[1]["regions"]["away"]["engines"] == 0
        late = {"kind": "apply", "at": 2003.0, "engine": "e1", "region": "away", "line": "rl", "version": 2}
        with (run / "events/e1.jsonl").open("a") as file:
            file.write(json.dumps(late) + "\n")
        again = json.loads(process.stdout.readline())
        assert again["version"] == 2 and again["regions"]["away"]["serving_seconds"] == 3.0
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
