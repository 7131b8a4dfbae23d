from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from rollmill.chat.tokenizer import Tokenizer
from rollmill.machines.namespace.client import NamespaceHost
from tests.chat.conftest import tokenizer  # noqa: F401
from tests.machines.conftest import host  # noqa: F401
from tests.rollouts.world import World, open_world


@pytest_asyncio.fixture(loop_scope="module")
async def world(
    tmp_path: Path,
    tokenizer: Tokenizer,  # noqa: F811
    host: NamespaceHost,  # noqa: F811
) -> AsyncIterator[World]:
    async with open_world(tmp_path, tokenizer, host) as world:
        yield world
        for task in asyncio.all_tasks():  # a test that failed may have left its dispatcher, which would go on for ever
            if getattr(task.get_coro(), "__qualname__", "") == "Dispatcher.run":
                task.cancel()
                await asyncio.wait([task])
