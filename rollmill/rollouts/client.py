"""The rollout side of the gateway: open a session for a trajectory, seal it, give it up."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from rollmill.errors import GatewayError


class GatewayClient:
    """Admin calls to the gateway at a URL. A gateway that is being restarted is waited for, up to `patience_s`."""

    def __init__(self, base_url: str, admin_token: str, *, patience_s: float = 60.0) -> None:
        self.base_url = base_url
        self._headers = {"Authorization": f"Bearer {admin_token}"}
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GatewayClient:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def open_session(self, trajectory: str, **facts: Any) -> str:
        """The key the harness talks to the model with; everything said with it is recorded as `trajectory`."""
        return (await self._call("POST", "/sessions", {"trajectory": trajectory, **facts}))["key"]

    async def seal(self, trajectory: str, submission_key: str | None) -> dict[str, Any]:
        """The session becomes one object and the trajectory is finished. Safe to repeat."""
        return await self._call("POST", f"/sessions/{trajectory}/seal", {"submission_key": submission_key})

    async def abandon(self, trajectory: str) -> None:
        """Forget a session that will not be finished."""
        await self._call("DELETE", f"/sessions/{trajectory}", None)

    async def wait_until_healthy(self) -> dict[str, Any]:
        return await self._call("GET", "/health", None)

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        assert self._session is not None, "use as an async context manager"
        deadline = asyncio.get_running_loop().time() + self._patience_s
        pause = 0.05
        while True:
            try:
                async with self._session.request(
                    method, self.base_url + path, json=body, headers=self._headers
                ) as response:
                    if response.status == 503 and asyncio.get_running_loop().time() < deadline:
                        raise aiohttp.ClientConnectionError("gateway not ready")
                    if response.status >= 400:
                        text = (await response.text())[:500]
                        raise GatewayError(
                            f"{method} {path} answered {response.status}: {text}", status=response.status
                        )
                    return await response.json() if response.content_length != 0 else {}
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise GatewayError(
                        f"{self.base_url} did not answer for {self._patience_s:.0f} s: {error}",
                        status=503,
                        hint="is the gateway process running? its log is under logs/ of the run directory",
                    ) from None
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
