"""PackageProcess: a program in a process and an interpreter of its own, which has the package of an environment.

    Rollmill ──► {"id": 3, …}                          one JSON object per line
             ◄── {"id": 3, "is": …}                    or {"id": 3, "error": "why"}
             ──► {"cancel": 3}                         nobody waits for this answer any more
             ◄── {"id": 3, "call": 7, "what": …}       what the program asks for meanwhile
             ──► {"reply": 7, "is": …}                 or {"reply": 7, "error": "why"}

The package may need any versions of other packages. What it prints goes to the log of the role. An answer that is too
long is an error, like an exception. If the program ends, or a request goes on after it was cancelled, the process is
killed: all its requests fail, and the next one starts it again. It ends when Rollmill does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from rollmill.config import Config, LocalPath
from rollmill.environments.tasks.listed import TRAIN, digest
from rollmill.environments.tasks.task_splits import HELDOUT
from rollmill.errors import HarnessError, TaskError

_LONGEST = 1 << 26  # bytes of one answer; the programs have a lower limit
_ERROR = 2000  # characters
_LOAD_S = 1800.0  # a dataset may have to be downloaded
_CANCEL_S = 5.0
_MOST_CALLS = 16  # of one request at once
_PASSED = (  # the others may be keys of judges, stores and databases, which are not the package's
    "home", "user", "logname", "lang", "lc_", "tz", "ld_library_path", "tmpdir", "xdg_", "http_proxy", "https_proxy",
    "no_proxy", "all_proxy", "ssl_cert_", "requests_ca_bundle", "hf_home", "hf_hub_cache", "hf_hub_offline",
    "hf_datasets_cache", "docker_host", "pythonpath",
)  # fmt: skip


Reply = Callable[[Any], Awaitable[Any]]


class InterpreterConfig(Config):
    python: LocalPath | None = Field(
        None,
        description="Python interpreter that has the environment's package, for example that of a virtual environment. "
        "Not set: the one that runs Rollmill.",
    )
    variables: tuple[str, ...] = Field(
        (),
        description="Names of environment variables that the package's process gets, for example keys of tools that it "
        "calls. Of the others it gets paths, languages, proxies, certificates and caches alone.",
    )


class PackageConfig(InterpreterConfig):
    tasks: int = Field(1000, ge=1, description="Most tasks that are taken from the environment: it may be endless.")
    heldout_share: float = Field(
        0.1, ge=0, le=1, description="Share of the tasks that is held out, chosen by a hash of the id."
    )

    def split_of(self, task_id: str) -> str:
        return HELDOUT if digest("split", task_id) < self.heldout_share else TRAIN


class PackageProcess:
    """One per harness: it answers the requests of all episodes. `what` names the environment in errors."""

    def __init__(self, what: str, config: InterpreterConfig, program: str, order: dict[str, Any]) -> None:
        """`order` is the program's first line: what it should do from then on."""
        self._what, self._order, self._variables = what, order, config.variables
        programs = [str(Path(__file__).with_name(name)) for name in ("program.py", program)]
        # -P: in the folder of the program are modules that have the names of the packages
        self._argv = [config.python or sys.executable, "-P", *programs]
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._replies: dict[int, Reply] = {}
        self._calls: dict[int, set[asyncio.Task[None]]] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()

    def ask_alone(self, request: dict[str, Any]) -> Any:
        """The answer of a process for this one request. TaskError if it fails."""
        lines = f"{json.dumps(self._order)}\n{json.dumps({'id': 0, **request})}\n".encode()
        try:
            with subprocess.Popen(self._argv, **self._options) as process:
                assert process.stdin is not None and process.stdout is not None
                timer = threading.Timer(_LOAD_S, _kill, [process.pid])
                timer.start()
                try:
                    process.stdin.write(lines)
                    process.stdin.flush()
                    said = process.stdout.readline(_LONGEST)
                finally:
                    timer.cancel()
                    _kill(process.pid)
            return self._value(json.loads(said) if said else {"error": f"its process ended, {_exit(process.wait())}"})
        except HarnessError as error:
            raise TaskError(error.message, hint=error.hint) from None
        except (OSError, ValueError) as error:
            raise TaskError(f"{self._what}: {error}"[:_ERROR], hint="`python` names its interpreter") from None

    async def ask(self, request: dict[str, Any], reply: Reply | None = None) -> Any:
        """The answer to a request. HarnessError if it fails. A caller that is cancelled ends the request.

        `reply` answers what the program asks for meanwhile. The program is told of its OSError and ValueError; any
        other error, as of a machine that has ended, fails the request.
        """
        async with self._starting:
            process = await self._started()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        calls = self._calls[number] = set()
        if reply is not None:
            self._replies[number] = reply
        try:
            await _write(process, {"id": number, **request})
            return self._value(await asyncio.shield(answer))
        except asyncio.CancelledError:
            await _write(process, {"cancel": number})
            _, late = await asyncio.wait([answer], timeout=_CANCEL_S)
            if late:
                _kill(process.pid)
                assert self._reading is not None
                await asyncio.wait([self._reading])  # the next request must start another process
            raise
        finally:
            del self._waiting[number], self._calls[number]
            self._replies.pop(number, None)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def close(self) -> None:
        if self._process is not None and self._reading is not None:
            _kill(self._process.pid)
            await asyncio.wait([self._reading])

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            try:
                self._process = await asyncio.create_subprocess_exec(*self._argv, limit=_LONGEST, **self._options)
            except OSError as error:
                raise HarnessError(f"{self._what}: {error}", hint="`python` names its interpreter") from None
            self._reading = asyncio.create_task(self._read(self._process))
            await _write(self._process, self._order)
        return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Give each request its answer. When the process has ended, fail those that still wait."""
        assert process.stdout is not None
        why = "its process ended"
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                if answer["id"] is None:
                    why = answer["error"]
                    break
                waiting = self._waiting.get(answer["id"])
                if waiting is None or waiting.done():
                    continue
                if "call" in answer:
                    self._begin_call(process, answer)
                else:
                    waiting.set_result(answer)
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            why = f"its process wrote what is no answer: {error}"
        _kill(process.pid)
        code = await process.wait()
        self._process = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": f"{why}, {_exit(code)}"})

    def _begin_call(self, process: asyncio.subprocess.Process, asked: dict[str, Any]) -> None:
        number, calls = asked["id"], self._calls[asked["id"]]
        if number not in self._replies or len(calls) >= _MOST_CALLS:
            raise ValueError(f"more than {_MOST_CALLS if number in self._replies else 0} calls at once")
        call = asyncio.create_task(self._reply(process, asked, self._replies[number], self._waiting[number]))
        calls.add(call)
        call.add_done_callback(calls.discard)

    async def _reply(
        self, process: asyncio.subprocess.Process, asked: dict[str, Any], reply: Reply, waiting: asyncio.Future[Any]
    ) -> None:
        try:
            said = {"is": await reply(asked.get("what"))}
        except (OSError, ValueError) as error:
            said = {"error": f"{type(error).__name__}: {error}"[:_ERROR]}
        except Exception as error:
            if not waiting.done():
                waiting.set_exception(error)
            return
        await _write(process, {"reply": asked["call"], **said})

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" not in answer:
            return answer["is"]
        hint = None
        if "ModuleNotFoundError" in answer["error"]:
            hint = f"install it for {self._argv[0]}, or set `python` to an interpreter that has it"
        raise HarnessError(f"{self._what}: {answer['error']}", hint=hint)

    @property
    def _options(self) -> dict[str, Any]:
        """A process group of its own, with the programs of its interpreter's environment first on the path."""
        missing = [name for name in self._variables if name not in os.environ]
        if missing:
            raise HarnessError(f"{self._what}: {missing[0]} in `variables` is not set", hint=f"export {missing[0]}=…")
        passed = {name: value for name, value in os.environ.items() if name.lower().startswith(_PASSED)}
        path = f"{Path(self._argv[0]).parent.absolute()}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        env = {**passed, **{name: os.environ[name] for name in self._variables}, "PATH": path, "PYTHONUNBUFFERED": "1"}
        return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": env, "start_new_session": True}


async def _write(process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has ended: `_read` tells why
        process.stdin.write(json.dumps(message).encode() + b"\n")
        await process.stdin.drain()


def _kill(pid: int) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
