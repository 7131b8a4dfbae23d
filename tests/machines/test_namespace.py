"""The functions of a machine: files, commands, snapshots, images."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import MachineError, TaskError
from rollmill.machines.guest import frames as wire
from rollmill.machines.images.image import BUILT_IN, load_image
from rollmill.machines.namespace.client import NamespaceConfig, NamespaceHost, NamespaceMachine
from tests.machines.conftest import start_host

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_files_are_written_and_read(host: NamespaceHost) -> None:
    machine = await host.create(BUILT_IN, {"main.py": b"x = 1\n", "package/deep/module.py": b"\x00\xff" * 1000})
    assert await machine.read("main.py") == b"x = 1\n"
    assert await machine.read("/work/package/deep/module.py") == b"\x00\xff" * 1000
    await machine.write("main.py", b"")
    assert await machine.read("main.py") == b""
    with pytest.raises(FileNotFoundError):
        await machine.read("absent.py")
    with pytest.raises(IsADirectoryError):
        await machine.read("package")
    with pytest.raises(FileNotFoundError):
        await machine.read("nul\0byte")
    with pytest.raises(OSError) as error:
        await machine.read("package/deep/module.py", max_bytes=1999)
    assert error.value.errno == errno.EFBIG
    await machine.close()


async def test_modules_in_the_current_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "random", "rollmill"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    monkeypatch.chdir(tmp_path)
    host = await start_host()
    machine = await host.create(BUILT_IN)
    assert (await machine.exec(["true"])).exit_code == 0
    await host.close()


async def test_commands_return_exit_code_output_and_time(machine: NamespaceMachine) -> None:
    result = await machine.exec(["sh", "-c", "cat; echo problem >&2; exit 3"], stdin=b"hello\n")
    assert (result.exit_code, result.output, result.truncated, result.stopped) == (3, b"hello\nproblem\n", False, None)
    assert result.seconds > 0
    assert (await machine.exec(["no-such-program"])).exit_code == 127
    assert (await machine.exec(["pwd"], cwd="/usr")).output == b"/usr\n"
    assert (await machine.exec(["sh", "-c", "echo $COLOUR"], env={"COLOUR": "blue"})).output == b"blue\n"
    assert (await machine.exec(["true"], cwd="/absent")).exit_code == 127


async def test_programs_are_found_on_the_path_and_nowhere_else(machine: NamespaceMachine) -> None:
    await machine.write("tool", b"#!/bin/sh\necho ran\n")
    await machine.write("first/tool", b"not executable")
    assert (await machine.exec(["./tool"])).exit_code == 126
    await machine.exec(["chmod", "+x", "tool"])
    assert (await machine.exec(["tool"])).exit_code == 127
    assert (await machine.exec(["./tool"])).output == b"ran\n"
    assert (await machine.exec(["tool"], env={"PATH": "/work/first:/work:/usr/bin:/bin"})).output == b"ran\n"
    assert (await machine.exec(["tool"], env={"PATH": "/work/first:/usr/bin:/bin"})).exit_code == 126


@pytest.mark.parametrize(
    "argv",
    [
        ["script.py", "one", "two"],
        ["-c", "import sys; print(sys.argv, sys.path[0], __name__, sys.stdin.read())", "x"],
        ["-m", "package.module", "y"],
        ["-m", "package.absent"],
        ["-c", "import sys; sys.exit('goodbye')"],
        ["-c", "raise SystemExit(300)"],
        ["-c", "import atexit; atexit.register(print, 'later'); print('now')"],
        ["-c", "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"],
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
        ["broken.py"],
        ["raises.py"],
        ["absent.py"],
        ["."],
    ],
    ids=lambda argv: " ".join(argv)[:40],
)
async def test_a_warm_python_behaves_like_a_cold_one(host: NamespaceHost, argv: list[str]) -> None:
    files = {
        "script.py": b"import sys, helper\nprint(sys.argv, __name__, __file__, helper.value, sys.stdin.readline())\n",
        "helper.py": b"value = 7\n",
        "package/module.py": b"import sys\nprint(sys.argv, __name__, __spec__.name)\n",
        "broken.py": b"def f(:\n",
        "raises.py": b"def f():\n    return undefined\ntry:\n    f()\nexcept NameError:\n    raise ValueError\n",
        "__main__.py": b"print('a directory')\n",
    }
    machine = await host.create(BUILT_IN, files)
    warm = await machine.exec(["python", *argv], stdin=b"a line\n")
    cold = await machine.exec(["env", "python", *argv], stdin=b"a line\n")
    assert (warm.exit_code, warm.output.decode()) == (cold.exit_code, cold.output.decode())


async def test_each_warm_python_starts_fresh(machine: NamespaceMachine) -> None:
    await machine.exec(["python", "-c", "import json, sys; json.dumps = None; sys.path.append('/nowhere'); x = 1"])
    program = "import json, sys; print(json.dumps([1]), '/nowhere' in sys.path, 'x' in globals())"
    assert (await machine.exec(["python", "-c", program])).output == b"[1] False False\n"
    result = await machine.exec(["python", "-c", "import sys; print([m for m in sys.modules if 'rollmill' in m])"])
    assert result.output == b"[]\n"


async def test_snapshot_and_copies_carry_files_and_links(bare_host: NamespaceHost) -> None:
    host = bare_host  # its forks are copies; test_forks.py has those that share files
    original = await host.create(BUILT_IN, {"main.py": b"x = 1\n", "folder/data": b"\x00" * 5000})
    await original.exec(["sh", "-c", "ln -s /etc/passwd link; mkfifo pipe; mkdir empty; chmod 755 main.py"])
    copy, other = await original.fork(2)
    await other.exec(["rm", "-r", "folder"])
    await original.write("main.py", b"x = 2\n")
    assert await copy.read("main.py") == b"x = 1\n"
    assert await copy.read("folder/data") == b"\x00" * 5000
    listing = await copy.exec(["find", ".", "-mindepth", "1"])
    assert sorted(listing.output.decode().split()) == ["./empty", "./folder", "./folder/data", "./link", "./main.py"]
    assert (await copy.exec(["test", "-x", "main.py"])).exit_code == 0
    again = await host.create(BUILT_IN, {"extra": b"e"}, snapshot=await original.snapshot())
    assert (await again.read("main.py"), await again.read("extra")) == (b"x = 2\n", b"e")


async def test_images_are_directories_and_unknown_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path.parent / "none"))  # not the images of whoever runs the tests
    (tmp_path / "library" / "source").mkdir(parents=True)
    (tmp_path / "library" / "source" / "a.py").write_bytes(b"a = 1\n")
    (tmp_path / "library" / "link").symlink_to("/etc/passwd")
    host = NamespaceHost(NamespaceConfig(images=str(tmp_path)))
    for wrong in ("libary", "../" + tmp_path.name, ""):
        with pytest.raises(TaskError, match=f"known images: {BUILT_IN}, library"):
            await host.create(wrong)
    try:
        machine = await host.create("library", {"main.py": b"import source.a\n"})
        listing = await machine.exec(["find", ".", "-type", "f"])
        assert sorted(listing.output.decode().split()) == ["./main.py", "./source/a.py"]
    finally:
        await host.close()


async def test_machines_are_made_concurrently_and_are_separate(host: NamespaceHost) -> None:
    machines = await asyncio.gather(*(host.create(BUILT_IN, {"name": str(i).encode()}) for i in range(20)))
    results = await asyncio.gather(*(machine.exec(["cat", "name"]) for machine in machines))
    assert [result.output for result in results] == [str(i).encode() for i in range(20)]
    await asyncio.gather(*(machine.close() for machine in machines))


async def test_a_machine_host_that_dies_is_an_infrastructure_failure_and_is_replaced(host: NamespaceHost) -> None:
    machine = await host.create(BUILT_IN)
    running = asyncio.create_task(machine.exec(["sleep", "30"], timeout_s=30))
    await asyncio.sleep(0.1)
    assert isinstance(host._process, subprocess.Popen)
    host._process.kill()
    with pytest.raises(MachineError):
        await running
    with pytest.raises(MachineError):
        await machine.read("main.py")
    await machine.close()
    fresh = await host.create(BUILT_IN)
    assert (await fresh.exec(["true"])).exit_code == 0


async def test_a_machine_that_could_not_be_set_up_says_why(host: NamespaceHost) -> None:
    """Its first process tells the reason and ends, maybe before the first request is sent."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        theirs.sendall(wire.pack({"error": "OSError: mount proc /proc"}))
    machine = NamespaceMachine(host, 10**9, load_image(BUILT_IN, None), ours)
    with pytest.raises(MachineError, match="mount proc /proc"):
        await machine.write_all({})
    await machine.close()


async def test_a_cancelled_request_leaves_no_wrong_answer_behind(machine: NamespaceMachine) -> None:
    await machine.write("main.py", b"mine")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await machine.exec(["sh", "-c", "sleep 0.5; echo late"])
    assert await machine.read("main.py") == b"mine"
    assert (await machine.exec(["echo", "mine"])).output == b"mine\n"


async def test_whoever_is_cancelled_leaves_no_complaint_of_asyncio_behind() -> None:
    """As Ctrl-C does: those who wait for the end of a machine are cancelled, then the machine host is closed."""
    complaints: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    host = NamespaceHost()
    machine = await host.create(BUILT_IN)
    ending = asyncio.create_task(machine.close())
    while not host._ending:  # noqa: ASYNC110
        await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait([ending])
    await host.close()
    del ending, machine, host
    gc.collect()
    loop.set_exception_handler(None)
    assert not complaints


async def test_refusals_of_the_kernel_have_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.machines.namespace import launch

    monkeypatch.setattr(launch, "_setting", lambda name: "0" if name == "user/max_user_namespaces" else None)
    assert "max_user_namespaces" in launch.hint()


async def test_no_message_to_the_machine_host_is_lost_while_its_socket_is_full() -> None:
    """Hundreds of machines are asked for at once. Messages that were lost held up their rollouts for 20 seconds."""
    host, loop = NamespaceHost(), asyncio.get_running_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        host._control = ours
        telling = [asyncio.create_task(host._tell("create", number)) for number in range(200)]
        await asyncio.sleep(0)
        await asyncio.wait(telling, timeout=0.1)
        assert sum(task.done() for task in telling) < 100, "the socket is full"
        async with asyncio.timeout(60):
            seen = [json.loads(await loop.sock_recv(theirs, 1 << 16))["id"] for _ in telling]
            await asyncio.gather(*telling)
        assert sorted(seen) == list(range(200))
        host._control = None
        with pytest.raises(MachineError, match="not running"):
            await host._tell("create", 200)
