"""The role processes of a run on this machine: starts, watches, restarts and stops them.

No role process holds a handle to another: they meet in the stores and at URLs. So one can be restarted without telling
the others. Their output goes to `logs/NAME.log` of the run directory.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollmill.errors import ConfigError, RollmillError
from rollmill.launch.devices import VARIABLE, give_out, present_gpus
from rollmill.launch.fork_server import Child, ForkServer
from rollmill.launch.launcher import FINAL, Role
from rollmill.launch.rank_processes import outside_world, places, rank_name
from rollmill.launch.role_inputs import hand_to
from rollmill.runs.exits import STOP_PATIENCE_S, describe_exit, last_words
from rollmill.runs.lock import holder, terminate
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.shared.beacon import driven_elsewhere
from rollmill.runs.shared.presence import Presence
from rollmill.runs.trust import check_tls

RANK_PATIENCE_S = 2.0  # for ranks to notice that another one has died
COMMAND = "from rollmill.cli.main import main; main()"
DETACH_PATIENCE_S = 60.0  # for a supervisor in the background to take the run's lock


@dataclass
class LocalRole(Role):
    processes: list[Child] = field(default_factory=list)  # one per rank


class Local:
    """`[cluster] kind = "local"`: everything on this host. The supervisor is the command itself. With a `store` that
    other hosts reach, commands there see and stop the run too."""

    elsewhere = False

    def check(self, config: RunConfig) -> None:
        check_tls(config)
        if any(table.labels for table in config.engines):
            raise ConfigError(
                'a table of [[engines]] has `labels`, but [cluster] kind = "local" has no other host to choose',
                hint='leave them out, or set kind = "ray" in [cluster]',
            )
        if not outside_world():
            give_out(config, present_gpus())

    def open(self, run: RunDirectory) -> LocalLauncher:
        return LocalLauncher(run)

    def submit(self, run: RunDirectory) -> None:
        """Continue the run with a process in a session of its own. Its output is `logs/train.log`."""
        if self.collect(run) is not None:
            return
        run.logs.mkdir(parents=True, exist_ok=True)
        with (run.logs / "train.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, "train", "--resume", str(run.path.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + DETACH_PATIENCE_S
        while holder(run.path, "supervisor") is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RollmillError(
                    f"{run.path} was not started: {last_words(run.logs, 'train')}", hint=f"see {run.logs / 'train.log'}"
                )
            time.sleep(0.05)

    def collect(self, run: RunDirectory) -> str | None:
        by = holder(run.path, "supervisor")
        return driven_elsewhere(run) if by is None else str(by)

    def halt(self, run: RunDirectory) -> None:
        by = holder(run.path, "supervisor")
        if by is not None:
            terminate(by)
        elif driven_elsewhere(run) is not None:
            Presence(run.objects()).ask_to_stop()


class LocalLauncher:
    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._roles: dict[str, LocalRole] = {}
        self._fork_server = ForkServer()
        self._gpus = self._give_out(run, {})

    def start(self, role: str, *arguments: str, threads: int = 1, service: bool = False, ranks: int = 1) -> None:
        process = LocalRole(role, arguments, threads, service, ranks)
        self._roles[role] = process
        self._spawn(process)

    def rescale(self, run: RunDirectory) -> None:
        wanted = {spec.role for spec in run.config.engine_specs}
        kept = {role for role in self._roles if role in wanted}
        gpus = self._give_out(run, {role: self._gpus[role] for role in kept if role in self._gpus})
        kept = {role for role in kept if gpus.get(role) == self._gpus.get(role)}  # the caller starts the others again
        gone = [role for role in self._roles if role.startswith("engine-") and role not in kept]
        _end([process for role in gone for process in self._roles.pop(role).processes])
        self._run, self._gpus = run, gpus

    def running(self) -> list[str]:
        return [name for name, role in self._roles.items() if not role.ended]

    def ended(self, role: str) -> bool:
        return self._roles[role].ended

    def watch(self) -> None:
        """Check every process once: mark the roles that are done, restart those that died."""
        for role in self._roles.values():
            if role.ended:
                continue
            codes = [process.poll() for process in role.processes]
            if all(code == 0 for code in codes) and not role.service:
                role.ended = True
            elif any(code is not None and (code != 0 or role.service) for code in codes):
                self._restart(role, *_end_all(role.processes))

    def stop(self) -> None:
        """Stop all processes."""
        self.stop_roles()
        self._fork_server.close()

    def stop_roles(self) -> None:
        """Send SIGTERM to all roles; kill what is left after STOP_PATIENCE_S. Others may be started afterwards."""
        _end([process for role in self._roles.values() if not role.ended for process in role.processes])
        self._roles.clear()

    def _give_out(self, run: RunDirectory, held: dict[str, list[str]]) -> dict[str, list[str]]:
        if outside_world():  # torchrun gives out the devices of its ranks itself
            return {}
        return give_out(run.config, present_gpus(), trains=not run.service_of, held=held)

    def _restart(self, role: LocalRole, rank: int, code: int) -> None:
        """All ranks have exited; `rank` is the one whose log says why."""
        # torchrun restarts ranks on all machines together: a restart here would leave the others behind
        if not role.may_restart(code) or (outside_world() and not role.service):
            name = rank_name(role.name, rank)
            hint = f"the rest is in {self._run.logs / (name + '.log')}"
            if self._run.service_of is None:
                hint += f"; once it is fixed, `rollmill train --resume {self._run.path}` continues the run"
            raise RollmillError(
                f"process {name!r} {describe_exit(code)}: {last_words(self._run.logs, name)}", hint=hint
            )
        role.wait_for_restart(code)
        self._spawn(role)

    def _spawn(self, role: LocalRole) -> None:
        role.started_at = time.monotonic()
        role.processes = []
        for rank, place in enumerate(places(role.ranks)):
            name = rank_name(role.name, rank)
            process = self._fork_server.start(
                role.name,
                hand_to(self._run, role.name),
                role.arguments,
                name=f"rollmill {name} {self._run.path}",
                environment={"OMP_NUM_THREADS": str(role.threads), **self._devices(role), **place},
                log=self._open_log(name),
            )
            role.processes.append(process)

    def _devices(self, role: LocalRole) -> dict[str, str]:
        return {VARIABLE: ",".join(self._gpus[role.name])} if role.name in self._gpus else {}

    def _open_log(self, name: str) -> Path:
        """Check that the log of a process can be written, and return its path."""
        path = self._run.logs / f"{name}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise RollmillError(
                f"process {name!r} cannot be started: its log {path} cannot be opened: {error.strerror}",
                hint="is the disk full, or was the directory moved? once it is fixed, run the same command again",
            ) from None
        return path


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that a supervisor which is asked to stop stops its roles in
    order. SIGINT does so too where a shell started the supervisor in the background, with SIGINT ignored."""
    asked = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, signal.default_int_handler) for number in asked]
    try:
        yield
    finally:
        for number, handler in zip(asked, previous, strict=True):
            signal.signal(number, handler)


def _end(processes: Sequence[Child]) -> None:
    """Send SIGTERM; kill what is left after STOP_PATIENCE_S."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_PATIENCE_S
    for process in processes:
        if process.wait(max(0.1, deadline - time.monotonic())) is None:
            process.signal(signal.SIGKILL)
            process.wait(STOP_PATIENCE_S)


def _end_all(processes: Sequence[Child]) -> tuple[int, int]:
    """One rank has exited: stop the others, return the failing rank and its exit code."""
    failed = [rank for rank, process in enumerate(processes) if process.poll() is not None]
    deadline = time.monotonic() + RANK_PATIENCE_S
    for process in processes:  # another rank may know the cause, and exits a moment later
        process.wait(max(0.0, deadline - time.monotonic()))
        process.signal(signal.SIGKILL)
    codes = [process.wait(STOP_PATIENCE_S) or 0 for process in processes]
    final = [rank for rank, code in enumerate(codes) if code == FINAL]
    rank = (final or [rank for rank in failed if codes[rank]] or failed)[0]
    return rank, codes[rank]
