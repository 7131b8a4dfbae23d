"""A chat needs no machine before it is graded: it gets a folder in memory."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import CompactFormat
from rollmill.environments.harnesses.chat import ChatConfig, ChatHarness
from rollmill.environments.task import WholeDiff
from rollmill.environments.task_machine import Folder
from tests.rollouts.world import FailingHost, World, make_task

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_chat_gets_a_folder_and_no_machine_until_it_is_graded(world: World) -> None:
    """The host of agents' machines only fails; grading has a real one."""
    harness = ChatHarness(ChatConfig(request_deadline_s=60.0))
    broken = FailingHost(lambda asked: True)
    context = replace(world.context, harness=harness, machines=broken)
    text = assistant_message("def f(x):\n    return x + 7\n", [])
    world.says(CompactFormat(world.tokenizer).render_answer(text, []))
    solved = await world.play(context=context)
    assert solved.solved and broken.asked == 0
    assert [message["role"] for message in world.context.trajectories.load("t0").messages][-1] == "assistant"
    whole = await world.play(make_task(submission=WholeDiff()), "t1", context)
    assert whole.reward is None and broken.asked == 1, "what changed is found by comparing machines"
    await harness.close()


async def test_a_folder_holds_files_and_has_limits() -> None:
    folder = Folder(make_task())
    await folder.write("./sub/../answer.txt", b"x" * 11)
    assert await folder.read("/work/answer.txt") == b"x" * 11 and (await folder.read("main.py")).startswith(b"def f")
    for path, limit, number in (("answer.txt", 10, errno.EFBIG), ("absent", 10, errno.ENOENT)):
        with pytest.raises(OSError) as raised:
            await folder.read(path, max_bytes=limit)
        assert raised.value.errno == number
    await folder.close()
