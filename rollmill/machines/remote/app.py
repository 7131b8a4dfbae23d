"""The HTTP application of `rollmill machines serve`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from rollmill.errors import MachineError
from rollmill.machines.guest import frames as wire
from rollmill.machines.remote.e2b import E2B
from rollmill.machines.remote.outward import offer
from rollmill.machines.remote.routes import Routes, frame_answer
from rollmill.machines.remote.rpc import RpcError
from rollmill.machines.remote.service import Service


def make_app(service: Service) -> web.Application:
    limit = wire.LENGTHS.size + wire.MAX_HEADER + wire.MAX_BODY
    app = web.Application(client_max_size=limit, middlewares=[_report])
    Routes(service).add_to(app)
    E2B(service).add_to(app)

    async def lifetime(_: web.Application) -> AsyncIterator[None]:
        yield
        await service.close()

    app.cleanup_ctx.append(lifetime)
    return app


async def serve_outwards(make: Callable[[], Awaitable[web.Application]], url: str, key: str) -> None:
    """Serve on a port of loopback, and offer it to the run at `url`. Until the process ends."""
    runner = web.AppRunner(await make(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await offer(url, key, runner.addresses[0][1])
    finally:
        await runner.cleanup()


@web.middleware
async def _report(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
    """Requests come from outside: one that makes no sense is refused, and ends nothing."""
    try:
        return await handler(request)
    except RpcError as error:
        return error.response()
    except MachineError as error:
        if request.path.startswith(("/machines", "/snapshots")):
            return frame_answer({"failed": error.message, "hint": error.hint})
        return RpcError("unavailable", str(error)).response()
    except (KeyError, TypeError, ValueError) as error:
        return web.json_response({"code": 400, "message": f"this request makes no sense: {error!r}"}, status=400)
