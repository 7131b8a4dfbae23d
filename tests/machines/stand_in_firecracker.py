"""A stand-in for the Firecracker process: its API by the published contract, its vsock, a namespace machine as guest.

    python -m tests.machines.stand_in_firecracker --id ID --api-sock PATH

Nothing here is Firecracker. It refuses what contracts/firecracker.json (an excerpt of the project's own file) does not
allow. Its guest is a real agent behind the real relay, which begins anew with every process: memory is not restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

from rollmill.machines.guest import frames as wire
from rollmill.machines.images.image import BUILT_IN, load_image
from rollmill.machines.namespace.client import NamespaceConfig, NamespaceHost
from rollmill.machines.qemu.relay import PORTS, Relay

CONTRACT = json.loads((Path(__file__).parent / "contracts" / "firecracker.json").read_text())
PRE_BOOT = ("/boot-source", "/machine-config", "/vsock", "/snapshot/load")
TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


def violations(value: Any, schema: dict[str, Any], where: str = "body") -> list[str]:
    """What the contract does not allow."""
    if "$ref" in schema:
        schema = CONTRACT["definitions"][schema["$ref"].rpartition("/")[2]]
    kind = TYPES[schema.get("type", "object")]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{where} is no {schema.get('type')}"]
    found = [f"{where}: not one of {schema['enum']}" for _ in [0] if value not in schema.get("enum", [value])]
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{where} is out of range")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        found += [f"{where}.{name} is missing" for name in schema.get("required", []) if name not in value]
        found += [f"{where}.{name} is not known" for name in value if name not in known]
        for name, inner in value.items():
            found += violations(inner, known[name], f"{where}.{name}") if name in known else []
    return found


class StandInFirecracker:
    """The API of one process, held to the contract and to the order of its states. Its files are in `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self.asked = root, "Not started", list[tuple[str, str]]()
        self.configured: set[str] = set()
        self.vsock: StandInVsock | None = None

    async def answer(self, request: web.Request) -> web.Response:
        method, path = request.method.lower(), request.path
        self.asked.append((method, path))
        try:
            operation = CONTRACT["paths"][path][method]
        except KeyError:
            return self._refuse(f"{method} {path} is not in the contract")
        if operation["body"] is None:
            return web.json_response({"firecracker_version": CONTRACT["version"]})
        body = await request.json()
        found = violations(body, CONTRACT["definitions"][operation["body"]])
        if path in PRE_BOOT and self.state != "Not started":
            found.append("The requested operation is not supported after starting the microVM.")
        if found:
            return self._refuse("; ".join(found))
        problem = self._act(path, body)
        return self._refuse(problem) if problem else web.Response(status=204)

    def _act(self, path: str, body: dict[str, Any]) -> str | None:
        self.configured.add(path)
        match path:
            case "/boot-source":
                for name in ("kernel_image_path", "initrd_path"):
                    if not (self.root / body[name]).is_file():
                        return f"there is no {body[name]}"
            case "/actions":
                if not {"/boot-source", "/machine-config", "/vsock"} <= self.configured:
                    return "it is not configured"
                self.state = "Running"
            case "/vm":
                self.state = {"Paused": "Paused", "Resumed": "Running"}[body["state"]]
            case "/snapshot/create":
                if self.state != "Paused":
                    return "save/restore: the microVM is not paused"
                (self.root / body["snapshot_path"]).write_bytes(b"state")
                (self.root / body["mem_file_path"]).write_bytes(b"memory")
                if self.vsock is not None:
                    self.vsock.reset()
            case "/snapshot/load":
                if self.configured - {"/snapshot/load"}:
                    return "Loading a microVM snapshot not allowed after configuring boot-specific resources."
                if (self.root / body["mem_backend"]["backend_path"]).read_bytes() != b"memory":
                    return "no memory"
                self.state = "Running"
        return None

    def _refuse(self, why: str) -> web.Response:
        return web.json_response({"fault_message": why}, status=400)


@contextlib.asynccontextmanager
async def serving(stand_in: StandInFirecracker, path: Path) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stand_in.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    yield
    await runner.cleanup()


class StandInVsock:
    """Firecracker's end of vsock: `CONNECT PORT` on one Unix socket leads to the relay's listener of that port."""

    def __init__(self, path: Path, listeners: dict[int, Path]) -> None:
        self._listeners, self.connections = listeners, list[asyncio.StreamWriter]()
        self._path = path
        self.kept: socket.socket | None = None  # the guest's end of its third port

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = (await reader.readline()).split()
        path = self._listeners.get(int(words[1])) if words[:1] == [b"CONNECT"] else None
        if path is None:
            writer.close()
            return
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"OK 1073741824\n")
        self.connections += [writer, inner_writer]
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    def reset(self) -> None:
        """As a snapshot does."""
        for writer in self.connections:
            writer.close()
        self.connections.clear()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def start_guest(directory: Path, *, boots: bool = False) -> tuple[NamespaceHost, StandInVsock]:
    """A real agent and a stand-in for `init`, behind the real relay; vsock is v.sock in the directory."""
    host = NamespaceHost(NamespaceConfig(memory_mb=128, disk_mb=16, processes=32))
    await host.create(BUILT_IN)  # the machine host runs now
    agent = (await host._connect(load_image(BUILT_IN, None)))._connection
    agent.setblocking(True)
    if boots:  # its first byte says that the guest may go on, which the machine host has told the agent already
        here, agent_end = agent, socket.socketpair()
        agent = agent_end[0]
        threading.Thread(target=_pump, args=(agent_end[1], here, 1), daemon=True).start()
        threading.Thread(target=_pump, args=(here, agent_end[1], 0), daemon=True).start()
    listeners, init, ports = [], socket.socketpair(), socket.socketpair()
    for port in PORTS:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / f"port-{port}"))
        listener.listen()
        listeners.append(listener)
    threading.Thread(target=_answer_as_init, args=(init[1],), daemon=True).start()
    threading.Thread(target=Relay(listeners, [agent, init[0], ports[0]]).run, daemon=True).start()
    vsock = StandInVsock(directory / "v.sock", {port: directory / f"port-{port}" for port in PORTS})
    vsock.kept = ports[1]
    await vsock.start()
    return host, vsock


def _pump(source: socket.socket, target: socket.socket, left_out: int) -> None:
    if left_out:
        source.recv(left_out)
    while data := source.recv(1 << 16):
        target.sendall(data)


def _answer_as_init(connection: socket.socket) -> None:
    while request := wire.receive(connection.fileno()):
        connection.sendall(wire.pack({"id": request[0]["id"]}))


async def main() -> None:
    """The process: its guest is there once it was started or loaded, and its connections are reset by a snapshot."""
    path = Path(sys.argv[sys.argv.index("--api-sock") + 1]).absolute()
    stand_in = StandInFirecracker(path.parent)
    async with serving(stand_in, path):
        while stand_in.state != "Running":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        _, stand_in.vsock = await start_guest(path.parent, boots=("put", "/actions") in stand_in.asked)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
