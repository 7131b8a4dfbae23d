"""All processes of a run on this machine: started, watched, restarted when they die, stopped in order.

No process holds a handle to another, so restarting one needs no word to the rest: they meet in the stores and at
URLs, and the run converges. What a process says goes to `logs/NAME.log` of the run directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollmill import telemetry
from rollmill.cluster.ranks import outside_world, places, rank_name
from rollmill.cluster.run import RunDirectory
from rollmill.errors import RollmillError

MAX_RESTARTS = 5  # of one process; more than that is a fault restarting does not mend
STEADY_S = 600.0  # a process that lived so long is judged anew when it dies
STOP_PATIENCE_S = 20.0
RANK_PATIENCE_S = 2.0  # for ranks to notice that another one has died
FINAL = 3  # a worker's exit code: trying again will not help, its log says why
TERMINATED = 128 + signal.SIGTERM  # a worker's exit code: it was asked to stop before its work was done
SUPERVISOR = "ROLLMILL_SUPERVISOR"  # environment variable: the process a worker must not outlive


@dataclass
class Worker:
    """A child process, or several ranks that live and die together, as torchrun's do. It has `ended` when all exited
    with 0: its work is done. The work of a service never is."""

    role: str
    arguments: tuple[str, ...]
    threads: int
    service: bool
    ranks: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started_at: float = 0.0
    restarts: int = 0
    ended: bool = False


class LocalCluster:
    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._workers: dict[str, Worker] = {}

    def start(self, role: str, *arguments: str, threads: int = 1, service: bool = False, ranks: int = 1) -> None:
        worker = Worker(role, arguments, threads, service, ranks)
        self._workers[role] = worker
        self._spawn(worker)

    def ended(self, role: str) -> bool:
        return self._workers[role].ended

    def watch(self) -> None:
        """Look at every process once: note the ones that are done, start again the ones that died."""
        for worker in self._workers.values():
            if worker.ended:
                continue
            codes = [process.poll() for process in worker.processes]
            if all(code == 0 for code in codes) and not worker.service:
                worker.ended = True
            elif any(code is not None and (code != 0 or worker.service) for code in codes):
                self._restart(worker, *_end_all(worker.processes))

    def stop(self) -> None:
        """Ask all to finish; after a while stop asking."""
        alive = [process for worker in self._workers.values() if not worker.ended for process in worker.processes]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + STOP_PATIENCE_S
        for process in alive:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _restart(self, worker: Worker, rank: int, code: int) -> None:
        """All its ranks are ended; `rank` is the one that says why."""
        if time.monotonic() - worker.started_at > STEADY_S:
            worker.restarts = 0
        # ranks of other machines would not know of a restart: whoever started them all starts them all again
        if code == FINAL or worker.restarts >= MAX_RESTARTS or (outside_world() and not worker.service):
            name = rank_name(worker.role, rank)
            raise RollmillError(
                f"process {name!r} {_describe(code)}: {self._last_words(name)}",
                hint=f"the whole story is in {self._run.logs / (name + '.log')}; when mended, "
                f"`rollmill train --resume {self._run.path}` goes on",
            )
        worker.restarts += 1
        telemetry.emit("restart", target=worker.role, exit_code=code, restarts=worker.restarts)
        time.sleep(min(0.1 * 2**worker.restarts, 3.0))
        self._spawn(worker)

    def _spawn(self, worker: Worker) -> None:
        self._run.logs.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(worker.threads),
            "PYTHONUNBUFFERED": "1",
            SUPERVISOR: str(os.getpid()),
        }
        worker.started_at = time.monotonic()
        worker.processes = []
        command = [sys.executable, "-m", "rollmill.cluster.worker", worker.role, str(self._run.path), *worker.arguments]
        for rank, place in enumerate(places(worker.ranks)):
            with (self._run.logs / f"{rank_name(worker.role, rank)}.log").open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**environment, **place}
                )
            worker.processes.append(process)

    def _last_words(self, name: str) -> str:
        with (self._run.logs / f"{name}.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return " ".join(lines[-2:])[-600:] or "it said nothing"


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """End what is left of ranks one of which has ended: which of them tells why, and its exit code."""
    failed = [rank for rank, process in enumerate(processes) if process.poll() is not None]
    deadline = time.monotonic() + RANK_PATIENCE_S
    for process in processes:  # others may know better, and notice only now
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.wait()
    final = [rank for rank, process in enumerate(processes) if process.returncode == FINAL]
    rank = (final or [rank for rank in failed if processes[rank].returncode] or failed)[0]
    return rank, processes[rank].returncode


def _describe(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"stopped with exit code {code}"


@contextlib.contextmanager
def exclusive(run: RunDirectory, what: str, patience_s: float = 30.0) -> Iterator[None]:
    """Hold `locks/WHAT` of the run: two supervisors, or a dying trainer and its successor, never overlap."""
    (run.path / "locks").mkdir(parents=True, exist_ok=True)
    with (run.path / "locks" / what).open("w") as file:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RollmillError(
                        f"{run.path} is in use: another process holds {what!r}",
                        hint="wait for it to end or stop it; a killed run frees its locks by itself",
                    ) from None
                time.sleep(0.05)
        yield
