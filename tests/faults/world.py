"""A test world: real processes around real stores.

trainer ─► home store ─► object server ─► link (cut, slow) ─► keeper ─► region's store ─► followers
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import WeightStore
from rollmill.weights.format.manifest import Manifest
from tests.faults.roles import LINE, digest_of
from tests.processes import free_port

Report = dict[str, Any]
DEFAULTS = {"clock": 0.0, "patience": 0.6}


class Nursery:
    """Starts processes (roles.py)."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.faults.roles"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, **order: Any) -> int | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: int | None = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # seen once; a forked process may hold its input open
            self._process.kill()
            self._process.wait()


class Process:
    """One process. After a restart it writes to the same file."""

    def __init__(self, nursery: Nursery, given: Report) -> None:
        self._nursery, self.given, self.name = nursery, given, given["name"]
        self._path = Path(given["folder"]) / f"{self.name}.jsonl"
        self._reports: list[Report] = []
        self._offset = 0
        self.pid: int | None = None
        self.start()

    def start(self) -> None:
        self.pid = self._nursery.order(start=self.given)

    def restart(self) -> None:
        self.kill()
        self.start()

    def signal(self, number: int) -> None:
        self._nursery.order(signal=[self.pid, number])

    def kill(self) -> None:
        """kill -9, also if it is stopped or has ended."""
        self.signal(signal.SIGKILL)
        self._nursery.order(ended=self.pid, wait=True)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def ended(self) -> int | None:
        return self._nursery.order(ended=self.pid, wait=False)

    @property
    def reports(self) -> list[Report]:
        """All reports so far, of all its lives."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._reports += map(json.loads, whole.splitlines())
        return self._reports

    @property
    def last(self) -> Report:
        """The last report of this life."""
        reports = self.reports
        return reports[-1] if reports and reports[-1]["pid"] == self.pid else {}

    @property
    def number(self) -> int | None:
        return self.last.get("number")

    @property
    def problem(self) -> str | None:
        return self.last.get("problem")

    def log(self) -> str:
        path = self._path.with_suffix(".log")
        return path.read_text()[-3000:] if path.exists() else ""


class World:
    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.folder = folder
        self._nursery = nursery
        self._processes: list[Process] = []
        self._goal = folder / "goal"
        self.home = folder / "home"
        self.publish_to(-1)

    # -- the processes

    def trainer(
        self,
        name: str = "trainer",
        store: Path | str | None = None,
        seed: int = 0,
        snapshot_every: int = 1000,
        **more: Any,
    ) -> Process:
        facts = {"goal": str(self._goal), "seed": seed, "snapshot_every": snapshot_every, "pause": 0.01}
        return self._start("trainer", name, store or self.home, **{**facts, **more})

    def server(self, store: Path | None = None) -> tuple[Process, int]:
        """Serves a store over HTTP. Returns the process and its port."""
        port = free_port()
        process = self._start("server", "server", store or self.home, port=port)
        self.until(lambda: _listens(port))
        return process, port

    def keeper(
        self, source: Path | str, region: str = "away", anchor_every: int = 4, keep: int = 50, **more: Any
    ) -> Process:
        facts = {"source": str(source), "region": region, "anchor_every": anchor_every, "keep": keep}
        return self._start("keeper", f"keeper-{region}", self.folder / region, **{**facts, **more})

    def follower(self, name: str, store: Path | str, region: str = "away", **more: Any) -> Process:
        return self._start("follower", name, store, region=region, **more)

    def _start(self, role: str, name: str, store: Path | str, **facts: Any) -> Process:
        given = {**DEFAULTS, "role": role, "name": name, "folder": str(self.folder), "store": str(store), **facts}
        self._processes.append(Process(self._nursery, given))
        return self._processes[-1]

    @property
    def followers(self) -> list[Process]:
        return [process for process in self._processes if process.given["role"] == "follower"]

    def named(self, name: str) -> Process:
        return next(process for process in self._processes if process.name == name)

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    # -- actions

    def publish_to(self, number: int) -> None:
        """Lets the trainers publish up to this number."""
        staged = self.folder / "goal.new"
        staged.write_text(str(number))
        staged.replace(self._goal)

    def until(self, condition: Callable[[], object], seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError("it did not happen\n" + self.describe())
            time.sleep(0.02)

    def converge(self, number: int, followers: Iterable[Process] | None = None, seed: int = 0) -> None:
        """Waits until these serve that version, with the right bytes and without a problem."""
        wanted = {"number": number, "digest": digest_of(number, seed), "problem": None}
        for follower in followers or self.followers:
            self.until(lambda follower=follower: wanted.items() <= follower.last.items())  # type: ignore[misc]

    def until_problem(self, process: Process, *words: str) -> str:
        """Waits until its problem contains all of these, and returns it."""
        self.until(lambda: process.problem is not None and all(word in process.problem for word in words))
        assert process.problem is not None
        return process.problem

    # -- checks

    def check(self, *seeds: int) -> None:
        """Checks that everything ever served or published was right at once, and that no process crashed."""
        for process in self._processes:
            for report in process.reports:
                if report.get("number") is not None:
                    right = {digest_of(report["number"], seed) for seed in seeds or (0,)}
                    assert report["digest"] in right, f"{process.name} served {report}"
                    assert not report.get("healed"), f"{process.name} was given wrong weights before {report}"
            assert "Traceback" not in process.log(), process.log()

    def describe(self) -> str:
        return "\n".join(f"{process.name}: {process.last}\n{process.log()}" for process in self._processes)


def open_weights(store: Path) -> WeightStore:
    return WeightStore(Objects.open(store))


def manifest_of(store: Path, number: int) -> Manifest:
    return open_weights(store).manifest(Version(LINE, number))


def manifest_path(store: Path, number: int) -> Path:
    return store / f"weights/{LINE}/bf16/manifests/{number:010d}.manifest"


def delta_path(store: Path, number: int) -> Path:
    """The file with the delta of a version. A small model has one."""
    (pack,) = manifest_of(store, number).encoding("delta").packs
    return store / f"weights/{LINE}/bf16/packs/{number:010d}-{pack.digest}"


def broken(store: Path) -> list[tuple[int, str]]:
    """The versions in a store that cannot be restored from it, and why. Must be empty at every moment."""
    return [(version.number, why) for version, ok, why in open_weights(store).verify(LINE) if not ok]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
