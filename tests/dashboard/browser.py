"""A headless Chromium, driven through its DevTools protocol over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest


def find_chromium() -> str:
    """Its path. Where there is none the test is skipped; ROLLMILL_TEST_CHROMIUM=required makes that an error."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    if os.environ.get("ROLLMILL_TEST_CHROMIUM") == "required":
        pytest.fail("Chromium was not found")
    pytest.skip("Chromium was not found; apt-get install chromium")


class Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.complaints: list[str] = []  # errors of scripts, and what the security policy refused

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    async def open(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 1000) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until it is true. The test's own time limit ends it."""
        while not await self.value(script):  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def picture(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Tab]:
    """A tab of a browser that ends with the block."""
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
    browser = await asyncio.create_subprocess_exec(
        find_chromium(), *arguments, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        ports = profile / "DevToolsActivePort"
        while not ports.exists() or "\n" not in ports.read_text():
            assert browser.returncode is None, "Chromium has ended"
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{ports.read_text().splitlines()[0]}/json") as reply:
                pages = [each for each in await reply.json(content_type=None) if each["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            browser.kill()
        await browser.wait()
