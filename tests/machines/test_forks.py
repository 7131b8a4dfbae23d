"""Forks that share the files of their parent (namespace/forks.py)."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from pathlib import Path

import pytest

from rollmill.errors import MachineError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines.conftest import CONFIG, start_host

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _shares(host: NamespaceHost) -> None:
    if not host.limits["shared_forks"]:
        pytest.skip("this kernel or user cannot share files between machines")


async def sh(machine: NamespaceMachine, script: str) -> str:
    result = await machine.exec(["sh", "-c", script])
    return result.output.decode() if result.exit_code == 0 else f"{result.exit_code}: {result.output.decode()}"


async def is_shared(machine: NamespaceMachine) -> bool:
    return " /work " in await sh(machine, "grep ' overlay ' /proc/self/mountinfo || true")


async def close_all(*machines: NamespaceMachine) -> None:
    await asyncio.gather(*(machine.close() for machine in machines))


def layers(host: NamespaceHost) -> set[str]:
    """The layers that the machine host has mounted, in the mount namespace that only it can reach."""
    assert host._process is not None
    process = Path(f"/proc/{host._process.pid}")
    own = os.readlink(process / "ns/mnt")
    for file in (process / "fd").iterdir():
        if os.readlink(file).startswith("mnt:") and os.readlink(file) != own:
            listing = subprocess.run(["nsenter", f"--mount={file}", "ls", "/tmp"], capture_output=True, check=True)
            return {name for name in listing.stdout.decode().split() if name.isdigit()}
    raise AssertionError("it has no such namespace")


async def test_parent_children_and_grandchildren_write_apart(host: NamespaceHost) -> None:
    parent = await host.create(BUILT_IN, {"a": b"0", "folder/b": b"0", "gone": b"0"})
    await sh(parent, "ln -s /etc/passwd link; mkfifo pipe; chmod 500 folder; chmod 0 gone; chmod 711 .; ln a hard")
    first, second = await parent.fork(2)
    assert parent.capabilities.shared_fork and await is_shared(first) and await is_shared(parent)
    script = "stat -c '%n %F %a %u %g' . * | sort; cat a folder/b"
    listing = await sh(parent, script)
    assert "pipe fifo 644 1000 1000" in listing and ". directory 711 1000 1000" in listing
    assert await sh(first, script) == await sh(second, script) == listing
    # each may do with the files of its parent what it could do with its own
    await sh(first, "chmod 700 folder; mv folder moved; echo 1 > moved/b; rm gone; chmod 600 a; echo 1 > a")
    (grandchild,) = await first.fork()
    await sh(first, "rm -r moved; mkdir moved; echo later > moved/c; rm a")
    await parent.write("a", b"2")
    assert await sh(grandchild, "cat a moved/b; ls") == "1\n1\na\nhard\nlink\nmoved\npipe\n"
    assert await sh(first, "cat moved/*; ls") == "later\nhard\nlink\nmoved\npipe\n"
    assert await sh(second, "cat a folder/b; ls") == "00a\nfolder\ngone\nhard\nlink\npipe\n"
    assert await sh(parent, "cat a hard folder/b; touch new; ls") == "200a\nfolder\ngone\nhard\nlink\nnew\npipe\n"
    await close_all(parent, first)  # the layers that they have written stay for the others
    assert await sh(grandchild, "cat a moved/b; rm -r *; ls") == "1\n1\n"
    assert await sh(second, "cat a folder/b") == "00"
    await close_all(second, grandchild)


async def test_nothing_is_left_of_layers_that_nobody_has(host: NamespaceHost) -> None:
    before = layers(host)
    parent = await host.create(BUILT_IN, {"secret": b"of the parent"})
    children = [*await parent.fork(2), *await parent.fork()]  # at the second fork there is nothing new to freeze
    assert len(layers(host) - before) == 5  # one is frozen, and four are written to
    await parent.close()
    strangers = [await host.create(BUILT_IN) for _ in range(12)]  # more than are made ahead: they get what is free
    assert set(await asyncio.gather(*(sh(each, "ls -A /work /tmp") for each in strangers))) == {"/tmp:\n\n/work:\n"}
    assert len(layers(host) - before) == 4
    assert await children[2].read("secret") == b"of the parent"
    await close_all(*children, *strangers)
    assert layers(host) == before


async def test_a_machine_in_which_a_process_runs_is_copied(host: NamespaceHost) -> None:
    parent = await host.create(BUILT_IN, {"log": b""})
    writer = await parent.start(["sh", "-c", "exec >> log; while :; do echo more; sleep 0.01; done"], cwd="/work")
    (child,) = await parent.fork()
    kept = await child.read("log")
    while len(await parent.read("log")) < len(kept) + 20:  # noqa: ASYNC110  the process goes on
        await asyncio.sleep(0.01)
    assert not await is_shared(child) and await child.read("log") == kept
    await writer.stop()
    (other,) = await parent.fork()
    assert await is_shared(other)
    await close_all(parent, child, other)


async def test_the_kernel_refuses_to_freeze_what_is_in_use(host: NamespaceHost) -> None:
    """Whatever pid 1 says: the machine host asks the kernel."""
    parent, child = await host.create(BUILT_IN, {"log": b"x"}), await host.create(BUILT_IN, {"own": b"y"})
    for program in (
        "cd /work; exec sleep 600",
        "cd /; exec sleep 600 < /work/log",
        "cd /; exec sleep 600 >> /work/log",
    ):
        process = await parent.start(["sh", "-c", program])
        while "sleep" not in await sh(parent, "cat /proc/[0-9]*/comm"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not await host.share(parent._id, [child._id])
        await process.stop()
    assert (await parent.read("log"), await child.read("own")) == (b"x", b"y")
    assert await host.share(parent._id, [child._id])
    assert await child.read("log") == b"x"
    assert not await host.share(parent._id, [10**9]) and not await host.share(10**9, [])
    await close_all(parent, child)


async def test_many_forks_of_one_machine(host: NamespaceHost) -> None:
    machine = await host.create(BUILT_IN)
    shared = []
    for number in range(40):
        await machine.write(f"file{number}", b"%d" % number)
        (child,) = await machine.fork()
        shared.append(await is_shared(child))
        assert len((await sh(child, "ls")).split()) == number + 1
        if number % 2:
            machine, child = child, machine  # go on with the child
        await child.close()
    assert shared[0] and not all(shared)  # a copy has no layers below it
    await machine.close()


async def test_what_is_frozen_is_bounded(host: NamespaceHost) -> None:
    """A machine that rewrites its files between forks does not fill its memory with layers that nobody sees."""
    parent, children, shared = await host.create(BUILT_IN), [], []
    for _ in range(4):
        assert await sh(parent, f"rm -f large; head -c {(CONFIG.disk_mb - 4) << 20} /dev/full > large") == ""
        children += await parent.fork()
        shared.append(await is_shared(children[-1]))
    assert shared[0] and not shared[-1]
    for child in children:
        assert await sh(child, "stat -c %s large") == f"{(CONFIG.disk_mb - 4) << 20}\n"
    await close_all(parent, *children)


async def test_a_child_has_its_own_limits(host: NamespaceHost) -> None:
    parent = await host.create(BUILT_IN, {"half": bytes(CONFIG.disk_mb << 19)})
    (child,) = await parent.fork()
    with pytest.raises(OSError) as error:
        await child.write("all", bytes((CONFIG.disk_mb << 20) + 1))
    assert error.value.errno == errno.ENOSPC
    eats = "import os\nheld = []\nwhile True: held.append(os.urandom(1 << 20))"
    assert (await child.exec(["python", "-c", eats])).stopped == "memory"
    assert await child.read("half", max_bytes=1 << 30) == bytes(CONFIG.disk_mb << 19)
    await close_all(parent, child)


async def test_escapes_from_a_child(host: NamespaceHost) -> None:
    parent = await host.create(BUILT_IN, {"a": b"0"})
    await sh(parent, "mknod erased c 0 0")  # what an overlay takes for "deleted"
    child, other = await parent.fork(2)
    attempts = {
        "mknod dev c 1 3": "not permitted",
        "mknod erased2 c 0 0": "not permitted",
        'python3 -c \'import os; os.setxattr("a", "trusted.overlay.redirect", b"/etc")\'': "not permitted",
        "python3 -c 'import os; os.chown(\"a\", 0, 0)'": "not permitted",
        "mount -o remount,rw /work": "",
        "umount /work": "",
        "ls /tmp/stage0": "No such file",
    }
    for attempt, words in attempts.items():
        said = await sh(child, attempt)
        assert said.partition(":")[0].isdigit() and words in said, attempt
    # a set-user-id program gives nothing
    await sh(child, "cp /bin/sh s; chmod 4755 s")
    assert (await sh(child, "./s -c 'id -u'")).strip() == "1000"
    assert await other.read("a") == b"0"
    await close_all(parent, child, other)


async def test_a_parent_that_dies_while_it_forks(host: NamespaceHost) -> None:
    before = layers(host)
    parent = await host.create(BUILT_IN, {"a": b"0"})
    forking = asyncio.create_task(parent.fork(2))
    await asyncio.sleep(0)
    await parent.close()
    result = (await asyncio.gather(forking, return_exceptions=True))[0]
    for child in result if isinstance(result, list) else []:
        assert await child.read("a") == b"0"
        await child.close()
    cancelled = await host.create(BUILT_IN, {"a": b"0"})
    for moments in range(1, 12, 2):
        task = asyncio.create_task(cancelled.fork(2))
        for _ in range(moments):
            await asyncio.sleep(0.001)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, list):
            await close_all(*result)
        assert await cancelled.read("a") == b"0"
    await cancelled.close()
    while layers(host) != before:  # noqa: ASYNC110  of children whose caller was cancelled, once they have ended
        await asyncio.sleep(0.01)


async def test_requests_wait_until_a_cancelled_fork_is_over(
    host: NamespaceHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine host goes on, and the parent may have no work directory for a moment."""
    parent = await host.create(BUILT_IN, {"a": b"0"})
    begun, go_on, real = asyncio.Event(), asyncio.Event(), host.share

    async def late(parent: int, children: list[int]) -> bool:
        begun.set()
        await go_on.wait()
        return await real(parent, children)

    monkeypatch.setattr(host, "share", late)
    forking = asyncio.create_task(parent.fork())
    await begun.wait()
    forking.cancel()
    reading = asyncio.create_task(parent.read("a"))
    assert await asyncio.gather(forking, return_exceptions=True) and not reading.done()
    await asyncio.wait([reading], timeout=0.2)
    assert not reading.done()
    go_on.set()
    assert await reading == b"0"
    children = await parent.fork(10)  # more than one request shares
    assert await asyncio.gather(*(child.read("a") for child in children)) == [b"0"] * 10
    await close_all(parent, *children)


async def test_a_machine_is_given_up_if_the_machine_host_does_not_say_what_it_did(
    host: NamespaceHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether it has its files: what its commands would do without them must not be graded."""
    parent = await host.create(BUILT_IN, {"a": b"0"})
    await sh(parent, "true")

    async def silent(parent: int, children: list[int]) -> bool:
        raise MachineError("the machine host does not answer")

    monkeypatch.setattr(host, "share", silent)
    with pytest.raises(MachineError):
        await parent.fork()
    with pytest.raises(MachineError):
        await parent.exec(["true"])
    await parent.close()


async def test_a_killed_machine_host_leaves_no_layer() -> None:
    """They are mounted in a namespace that ends with it."""
    host = await start_host()
    parent = await host.create(BUILT_IN, {"a": b"0"})
    await parent.fork()
    assert host._process is not None
    host._process.kill()
    await host.close()
    machine = await host.create(BUILT_IN, {"a": b"1"})  # it starts again
    (child,) = await machine.fork()
    assert await is_shared(child) and len(layers(host)) == 3
    await host.close()
