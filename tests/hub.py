"""A small hub on loopback for tests: the parts of Hugging Face's HTTP API that huggingface_hub uses to load and to
write repositories, over real sockets. It can cut connections in the middle of a file."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

LARGE = 1000  # bytes; files of this size are in LFS


@dataclass
class Hub:
    """Repositories as {"models/OWNER/NAME": {file: bytes}}."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)  # file: how often its connection is cut in the middle
    away: bool = False  # after a cut it answers with errors
    damaged: set[str] = field(default_factory=set)  # files whose bytes are not those of their hash
    claimed: dict[str, int] = field(default_factory=dict)  # file: the size that is told
    seen: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    tokens: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    denied: bool = False  # nobody may write
    url: str = ""
    uploaded: dict[str, bytes] = field(default_factory=dict)  # LFS objects by sha256

    def commit(self, repository: str) -> str:
        files = self.repositories[repository]
        return hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()


def _hash(data: bytes) -> str:
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _refused(code: str, status: int) -> web.Response:
    return web.json_response({"error": code}, status=status, headers={"X-Error-Code": code})


def _app(hub: Hub) -> web.Application:
    def found(request: web.Request, kind: str) -> str | web.Response:
        repository = f"{kind}/{request.match_info['owner']}/{request.match_info['name']}"
        hub.seen.append((request.method, request.path, request.headers.get("Range", "")))
        hub.tokens.add(request.headers.get("Authorization", ""))
        if repository not in hub.repositories:
            return _refused("RepoNotFound", 404)
        if request.match_info.get("revision", "main") not in ("main", hub.commit(repository)):
            return _refused("RevisionNotFound", 404)
        return repository

    async def info(request: web.Request) -> web.Response:
        repository = found(request, request.match_info["kind"])
        if not isinstance(repository, str):
            return repository
        name = repository.partition("/")[2]
        return web.json_response({"id": name, "sha": hub.commit(repository), "private": False, "siblings": []})

    async def tree(request: web.Request) -> web.Response:
        repository = found(request, request.match_info["kind"])
        if not isinstance(repository, str):
            return repository
        entries: list[dict[str, Any]] = []
        for name, data in hub.repositories[repository].items():
            size, oid = hub.claimed.get(name, len(data)), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry = {"type": "file", "path": name, "size": size, "oid": oid}
            if len(data) >= LARGE:
                entry["lfs"] = {"oid": _hash(data), "size": size, "pointerSize": 130}
            entries.append(entry)
        folders = {name.rpartition("/")[0] for name in hub.repositories[repository]} - {""}
        entries += [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
        return web.json_response(entries)

    async def resolve(request: web.Request) -> web.StreamResponse:
        repository = found(request, request.match_info.get("kind", "models"))
        if not isinstance(repository, str):
            return repository
        name = request.match_info["file"]
        if name not in hub.repositories[repository]:
            return _refused("EntryNotFound", 404)
        if repository in hub.gated:
            return _refused("GatedRepo", 403)
        if hub.away and hub.cut.get(name) == 0:
            return web.Response(status=500)
        data = hub.repositories[repository][name]
        headers = {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": hub.commit(repository), "Accept-Ranges": "bytes"}
        if name in hub.damaged:
            data = bytes(len(data))
        first = int(request.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        status = 206 if "Range" in request.headers else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(data) - first
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        if hub.cut.get(name, 0) > 0:
            hub.cut[name] -= 1
            await response.write(data[first : (first + len(data)) // 2])
            await asyncio.sleep(0.05)  # so that the half arrives
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(data[first:])
        return response

    async def create(request: web.Request) -> web.Response:
        asked = await request.json()
        name = f"models/{asked['organization']}/{asked['name']}"
        hub.repositories.setdefault(name, {})
        if asked["visibility"] == "private":
            hub.private.add(name)
        return web.json_response({"url": f"{hub.url}/{asked['organization']}/{asked['name']}"})

    async def preupload(request: web.Request) -> web.Response:
        if hub.denied:
            return web.json_response({"error": "you may not write here"}, status=403)
        files = (await request.json())["files"]
        modes = [
            {"path": each["path"], "uploadMode": "lfs" if each["size"] >= LARGE else "regular", "shouldIgnore": False}
            for each in files
        ]
        return web.json_response({"files": modes})

    async def batch(request: web.Request) -> web.Response:
        objects = (await request.json())["objects"]
        actions = [{**each, "actions": {"upload": {"href": f"{hub.url}/objects/{each['oid']}"}}} for each in objects]
        return web.json_response({"transfer": "basic", "objects": actions})

    async def store(request: web.Request) -> web.Response:
        data = await request.read()
        assert hashlib.sha256(data).hexdigest() == request.match_info["oid"]
        hub.uploaded[request.match_info["oid"]] = data
        return web.Response()

    async def commit(request: web.Request) -> web.Response:
        repository = found(request, "models")
        assert isinstance(repository, str)
        for line in (await request.text()).splitlines():
            change = json.loads(line)
            value = change["value"]
            if change["key"] == "file":
                hub.repositories[repository][value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "lfsFile":
                hub.repositories[repository][value["path"]] = hub.uploaded[value["oid"]]
        oid = hub.commit(repository)
        url = f"{hub.url}/{repository.partition('/')[2]}"
        return web.json_response({"commitUrl": f"{url}/commit/{oid}", "commitOid": oid, "success": True})

    app = web.Application(client_max_size=1 << 30)
    repository = "{owner}/{name}"
    app.router.add_post("/api/repos/create", create)
    app.router.add_post(f"/api/models/{repository}/preupload/{{revision}}", preupload)
    app.router.add_post(f"/api/models/{repository}/commit/{{revision}}", commit)
    app.router.add_post(f"/{repository}.git/info/lfs/objects/batch", batch)
    app.router.add_put("/objects/{oid}", store)
    app.router.add_get(f"/api/{{kind}}/{repository}", info)
    app.router.add_get(f"/api/{{kind}}/{repository}/revision/{{revision}}", info)
    app.router.add_get(f"/api/{{kind}}/{repository}/tree/{{revision}}", tree)
    app.router.add_get(f"/{{kind:datasets}}/{repository}/resolve/{{revision}}/{{file:.+}}", resolve)
    app.router.add_get(f"/{repository}/resolve/{{revision}}/{{file:.+}}", resolve)
    return app


@contextlib.contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """The hub in a thread of its own."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(_app(hub), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
