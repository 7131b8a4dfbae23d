"""The worker processes of a gateway: one address, several processes (rollmill/gateway/workers.py says who serves what).

The process that calls `run_workers` holds the sockets: the one that clients connect to, from which all workers accept,
and a Unix socket per worker. It forks the workers and starts again those that die. Sockets outlive workers, so a
connection that was made meanwhile waits for another worker, or for the next process of the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import shutil
import signal
import socket
import ssl
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web
from setproctitle import getproctitle, setproctitle

from rollmill.backoff import Backoff
from rollmill.errors import RollmillError
from rollmill.gateway.access.buckets import shared_file
from rollmill.gateway.recording.workers_log import move_sessions
from rollmill.gateway.replicas import Gateways
from rollmill.gateway.workers import Workers
from rollmill.launch.parent_death import SUPERVISOR, end_with_parent

log = logging.getLogger(__name__)
BACKLOG = 2048  # connections that may wait to be accepted; a full queue drops them, and clients try again after 1 s
_ACCEPTED_AT_ONCE = 8  # by one worker: the others get some of a burst too
_MOST_RESTARTS = 5  # in a row of a worker that dies before it serves; then a restart will not help either
_STOP_S = 10.0
_STOPS = (signal.SIGTERM, signal.SIGINT)
Build = Callable[[Workers], web.Application]


def run_workers(
    build: Build,
    listening: socket.socket,
    directory: Path,
    count: int,
    *,
    keepalive_s: float = 75.0,
    tls: ssl.SSLContext | None = None,
    gateways: Gateways | None = None,
) -> None:
    """Returns after SIGTERM or SIGINT. `build` makes the app of one worker, in its process. `directory` holds the
    session logs. `gateways`: if the run has several. Raises RollmillError if a worker dies again and again."""
    placed = move_sessions(directory, count)
    paths, sockets = _open_sockets(directory, count)
    listening.listen(BACKLOG)
    limits, serving, metrics = shared_file(), mmap.mmap(-1, count), directory / "metrics"
    shutil.rmtree(metrics, ignore_errors=True)  # of before: counters begin at 0
    metrics.mkdir()

    def work(number: int) -> None:
        def tell() -> None:
            serving[number] = 1

        workers = Workers(number, paths, limits, metrics, placed=placed, gateways=gateways)
        asyncio.run(_serve(build(workers), listening, sockets[number], keepalive_s, tls, tell))

    _Supervisor(serving, work).run()


class _Supervisor:
    """`serving`: memory that it shares with the workers, a byte of each: whether it serves."""

    def __init__(self, serving: mmap.mmap, work: Callable[[int], None]) -> None:
        self._work = work
        self._serving = serving
        self._pids: dict[int, int] = {}  # pid -> number
        self._backoffs = [Backoff(0.01, 2.0) for _ in range(len(serving))]
        self._stopping = False

    def run(self) -> None:
        for each in _STOPS:
            signal.signal(each, self._stop)
        for number in range(len(self._backoffs)):
            self._start(number)
        try:
            while self._pids:
                pid, status = os.wait()
                died = self._pids.pop(pid, None)
                if died is not None and not self._stopping:
                    self._restart(died, os.waitstatus_to_exitcode(status))
        finally:
            self._kill()

    def _start(self, number: int) -> None:
        self._serving[number] = 0
        parent = os.getpid()  # before the fork: the worker must notice a parent that died since then
        # Signals wait meanwhile: a worker must not run `_stop`, and `_stop` must know of the worker.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_STOPS, signal.SIGALRM))
        pid = os.fork()
        if pid:
            self._pids[pid] = number
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if self._stopping:  # asked to stop before the fork
                os.kill(pid, signal.SIGTERM)
            return
        code = 1
        try:
            code = _be(number, parent, self._work)
        finally:
            os._exit(code)

    def _restart(self, number: int, code: int) -> None:
        backoff = self._backoffs[number]
        if self._serving[number]:
            backoff.reset()
        if backoff.failures >= _MOST_RESTARTS:
            raise RollmillError(
                f"worker {number} of the gateway cannot be started: it died with code {code}",
                hint="the lines before this one say why",
            )
        log.warning("worker %d of the gateway died with code %d: it is started again", number, code)
        time.sleep(backoff.failed())
        self._start(number)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        self._signal(signal.SIGTERM)
        signal.signal(signal.SIGALRM, self._kill)
        signal.alarm(int(_STOP_S))

    def _kill(self, *_: object) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and `run` has not removed it yet
                os.kill(pid, number)


def _be(number: int, parent: int, work: Callable[[int], None]) -> int:
    """Become worker `number` of the process `parent`. Returns the exit code."""
    for each in (*_STOPS, signal.SIGALRM):
        signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_STOPS, signal.SIGALRM))
    os.environ[SUPERVISOR] = str(parent)
    end_with_parent()
    setproctitle(f"{getproctitle()} worker {number}")
    try:
        work(number)
        return 0
    except RollmillError as error:
        print(error, file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    return 1


async def _serve(
    app: web.Application,
    listening: socket.socket,
    own: socket.socket,
    keepalive_s: float,
    tls: ssl.SSLContext | None,
    serving: Callable[[], None],
) -> None:
    """Serves both sockets until SIGTERM. Calls `serving` when it does."""
    stopped = asyncio.Event()
    for number in _STOPS:
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    runner = web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=keepalive_s,
        shutdown_timeout=1.0,
        handler_cancellation=False,  # the answer to a client that disconnects is still recorded
    )
    await runner.setup()
    try:
        await web.SockSite(runner, own, backlog=BACKLOG).start()
        await web.SockSite(runner, listening, ssl_context=tls, backlog=_ACCEPTED_AT_ONCE).start()
        listening.listen(BACKLOG)  # asyncio has made the queue as short as the number that it accepts at once
        serving()
        await stopped.wait()
    finally:
        await runner.cleanup()


def _open_sockets(directory: Path, count: int) -> tuple[Sequence[str], Sequence[socket.socket]]:
    """A Unix socket per worker, in a directory that only this user can enter. The paths go through a descriptor of the
    directory, because those of sockets must be short."""
    place = directory / "sockets"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)  # stays open: the workers inherit it
    paths = [f"/proc/self/fd/{held}/{number}" for number in range(count)]
    sockets = []
    for path in paths:
        Path(path).unlink(missing_ok=True)
        opened = socket.socket(socket.AF_UNIX)
        opened.bind(path)
        opened.listen(BACKLOG)
        sockets.append(opened)
    return paths, sockets
