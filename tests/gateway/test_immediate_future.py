"""A task that waits for a Wake behaves as with a future of asyncio, only sooner."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from rollmill.gateway.immediate_future import Wake

NAME = ContextVar("NAME", default="nobody")


async def test_the_task_goes_on_within_set_and_in_its_own_context() -> None:
    loop, went_on = asyncio.get_running_loop(), list[str]()
    wake, turned = Wake(loop), asyncio.Event()

    async def wait() -> None:
        NAME.set("the task")
        await wake
        went_on.append(NAME.get())
        assert asyncio.current_task() is task
        await asyncio.sleep(0)  # and can wait again as usual
        went_on.append("the end")

    def turn() -> None:
        wake.set()
        assert went_on == ["the task"] and NAME.get() == "nobody"
        wake.set(RuntimeError("only the first call counts"))
        turned.set()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    loop.call_soon(turn)
    await turned.wait()
    await task
    assert went_on == ["the task", "the end"]
    await wake  # it is done: nobody waits


async def test_errors_cancellation_and_timeouts_reach_the_task() -> None:
    loop = asyncio.get_running_loop()

    async def wait(wake: Wake, seconds: float | None = None) -> None:
        async with asyncio.timeout(seconds):
            await wake

    failing, cancelled, late = Wake(loop), Wake(loop), Wake(loop)
    tasks = [asyncio.create_task(wait(wake)) for wake in (failing, cancelled)]
    await asyncio.sleep(0)
    loop.call_soon(failing.set, OSError("the disk"))
    tasks[1].cancel()
    with pytest.raises(OSError, match="the disk"):
        await tasks[0]
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert cancelled.cancelled() and cancelled.done() and not failing.cancelled()
    cancelled.set()  # too late, and no error
    with pytest.raises(TimeoutError):
        await asyncio.create_task(wait(late, 0.01))
    assert late.cancelled()
