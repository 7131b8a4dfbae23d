"""Virtual machines: commands, files, identity, snapshots, forks, and what a guest can and cannot do to its host.

Each test here runs real guests under QEMU. Time limits are long: software emulation beside other tests is slow.
"""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.environments.harnesses.command import CommandConfig, CommandHarness
from rollmill.environments.task import Task
from rollmill.errors import MachineError
from rollmill.machines import fidelity
from rollmill.machines.file_trees import get_tree, put_tree
from rollmill.machines.images.image import BUILT_IN, load_image
from rollmill.machines.machine import WORK, Snapshot
from rollmill.machines.namespace.emulation import kernel_directory
from rollmill.machines.oci.tar import Tar
from rollmill.machines.pool import Pool, PoolConfig
from rollmill.machines.probe import probe
from rollmill.machines.qemu import ram
from rollmill.machines.qemu.host import QemuHost, QemuMachine
from rollmill.machines.qemu.launch import start
from rollmill.machines.qemu.vm import Saved, Vm
from tests.environments.harnesses.test_coding import ScriptedModel
from tests.environments.harnesses.test_command import ASK, SAMPLING, text
from tests.machines.test_processes import _COUNT as COUNT
from tests.machines.test_processes import _FORGE as FORGE
from tests.machines.test_processes import until
from tests.machines.virtual import CONFIG, qemu_host, run_python  # noqa: F401

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
LONG_S = 120.0
MAC = "/sys/class/net/eth0/address"
HAS_INTERFACE = (kernel_directory() / "dummy.ko").is_file()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machine(qemu_host: QemuHost) -> AsyncIterator[QemuMachine]:  # noqa: F811
    machine = await qemu_host.create(BUILT_IN, {"main.py": b"x = 1\n", "package/deep/module.py": b"\x00\xff" * 1000})
    yield machine
    await machine.close()


async def test_the_probe_passes_and_measures(qemu_host: QemuHost) -> None:  # noqa: F811
    found = await probe(qemu_host)
    able = found.capabilities
    assert (able.kernel, able.snapshot, able.pause, able.architecture) == ("own", "full", True, os.uname().machine)
    assert able.slowdown >= 1.0


async def test_files_and_commands(machine: QemuMachine, tmp_path: Path) -> None:
    assert await machine.read("main.py") == b"x = 1\n"
    assert await machine.read("/work/package/deep/module.py") == b"\x00\xff" * 1000
    with pytest.raises(FileNotFoundError):
        await machine.read("absent.py")
    with pytest.raises(OSError) as error:
        await machine.read("package/deep/module.py", max_bytes=1999)
    assert error.value.errno == errno.EFBIG
    result = await machine.exec(
        ["sh", "-c", "cat; echo $COLOUR >&2; pwd; exit 3"], stdin=b"hello\n", env={"COLOUR": "red"}
    )
    assert (result.exit_code, result.output, result.stopped) == (3, b"hello\nred\n/work\n", None)
    assert (await machine.exec(["no-such-program"], timeout_s=LONG_S)).exit_code == 127
    for user, number in (("root", b"0\n"), ("root", b"0\n"), ("user", b"1000\n")):
        assert (await machine.exec(["id", "-u"], user=user, timeout_s=LONG_S)).output == number
    large = os.urandom(3 << 20)
    await machine.write("large", large)
    assert await machine.read("large", max_bytes=1 << 23) == large
    result = await machine.exec(["cat", "large"], timeout_s=LONG_S, max_output=1000)
    assert result.truncated and len(result.output) < 1100 and result.output.startswith(large[:500])
    await machine.exec(["rm", "large"])
    await get_tree(machine, "package", tmp_path / "package")
    await put_tree(machine, tmp_path, "again")
    assert await machine.read("again/package/deep/module.py") == b"\x00\xff" * 1000
    await machine.exec(["rm", "-r", "again"], timeout_s=LONG_S)


async def test_who_is_called_root_has_no_rights(machine: QemuMachine) -> None:
    rights = await machine.exec(["sh", "-c", "grep CapEff /proc/self/status"], user="root", timeout_s=LONG_S)
    assert int(rights.output.split()[1], 16) == 0


async def test_a_command_that_takes_too_long_ends_with_all_it_started(machine: QemuMachine) -> None:
    result = await machine.exec(["sh", "-c", "sleep 1000 & sleep 1000"], timeout_s=1.0)
    assert result.stopped == "time"
    assert await run_python(machine, "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))") == "2"


async def test_a_command_that_takes_all_memory_costs_only_itself(machine: QemuMachine) -> None:
    result = await machine.exec(["python", "-c", "x = [b'x' * (1 << 20) for _ in range(600)]"], timeout_s=LONG_S)
    assert result.exit_code != 0
    assert await machine.read("main.py") == b"x = 1\n"


async def test_a_fork_bomb_and_a_flood_of_files_cost_only_themselves(machine: QemuMachine) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert (await machine.exec(["python", "-c", bomb], timeout_s=8.0)).stopped in ("time", "processes", "memory")
    flood = "for place in /work /tmp ~; do dd if=/dev/zero of=$place/flood bs=64k count=100000; done 2>&1"
    result = await machine.exec(["sh", "-c", flood], timeout_s=LONG_S)
    assert result.stopped in (None, "memory") and (result.stopped or b"No space left" in result.output), result
    assert (await machine.exec(["sh", "-c", "rm -f /work/flood /tmp/flood ~/flood"], timeout_s=LONG_S)).exit_code == 0
    await machine.write("after", b"1")
    assert (await machine.exec(["cat", "after"], timeout_s=LONG_S)).output == b"1"


async def test_clones_do_not_repeat_each_other(qemu_host: QemuHost) -> None:  # noqa: F811
    """The first random numbers of each clone and its MAC, which without renewal are the same in all; and the time."""
    clones = [await qemu_host.create(BUILT_IN) for _ in range(6)]
    program = "import os, random, time, uuid; print(os.urandom(16).hex(), random.random(), uuid.uuid4(), time.time())"
    values = [(await run_python(clone, program)).split() for clone in clones]
    now = time.time()
    for column in range(3):
        assert len({value[column] for value in values}) == 6, values
    for value in values:  # the template is older than this
        assert now - LONG_S < float(value[3]) < now + 1
    if not HAS_INTERFACE:
        pytest.skip("the rest, of MAC addresses: the kernel here was taken without `dummy`")
    [fork] = await clones[0].fork(1)
    clones.append(fork)
    addresses = [(await clone.exec(["cat", MAC], timeout_s=LONG_S)).output for clone in clones]
    assert len(set(addresses)) == 7 and all(re.fullmatch(rb"02(:[0-9a-f]{2}){5}\n", each) for each in addresses)
    await clones[0].pause()
    await clones[0].resume()
    assert (await clones[0].exec(["cat", MAC], timeout_s=LONG_S)).output == addresses[0], "it is the same machine"
    await asyncio.gather(*(clone.close() for clone in clones))


async def test_forks_have_the_memory_of_their_parent_and_go_their_own_way(machine: QemuMachine) -> None:
    counter = await machine.start(
        ["python", "-u", "-c", "import time\nfor i in range(10**9): print(i); time.sleep(.05)"]
    )
    while not (await counter.state()).output:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    first, second = await machine.fork(2)
    await first.write("main.py", b"x = 2\n")
    assert [await each.read("main.py") for each in (machine, first, second)] == [b"x = 1\n", b"x = 2\n", b"x = 1\n"]
    (grandchild,) = await first.fork()
    assert await grandchild.read("main.py") == b"x = 2\n"
    count = "import os; print(len([name for name in os.listdir('/proc') if name.isdigit()]))"
    for each in (machine, first, second, grandchild):  # the agent, this program, and the process that was started
        assert await run_python(each, count) == "3"
    draw = "import os, random; print(os.urandom(16).hex(), random.random())"
    drawn = [(await run_python(each, draw)).split() for each in (machine, first, second, grandchild)]
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [4, 4], drawn
    printed = (await counter.state()).output
    await asyncio.sleep(0.5)
    assert len((await counter.state()).output) > len(printed), "the parent goes on"
    await counter.stop()
    await asyncio.gather(first.close(), second.close(), grandchild.close())


_DRAW = """
import os, time
with open("drawn", "w", 1) as file:
    while True:
        print(time.monotonic(), os.urandom(16).hex(), time.monotonic(), file=file)
        time.sleep(.001)
"""


async def _drawn(machine: QemuMachine) -> dict[str, tuple[float, float]]:
    """The random numbers that a process has drawn, in order: when it began to draw each, and when it had it."""
    result = await machine.exec(["cat", "drawn"], timeout_s=LONG_S, max_output=1 << 24)
    if result.exit_code != 0:  # it has not begun to write
        return {}
    lines = [line.split() for line in result.output.decode().split("\n")[:-1]]
    return {number: (float(began), float(ended)) for began, number, ended in lines}


async def test_no_process_of_a_fork_runs_before_it_has_entropy_of_its_own(
    qemu_host: QemuHost,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process draws random numbers while its machine forks. What it drew before, all copies have. The forks get their
    entropy late: a process that goes on before draws what the other one draws."""
    late_s, renew = 0.5, Vm.renew

    async def late(vm: Vm, *, restored: bool = False) -> None:
        await asyncio.sleep(late_s)
        await renew(vm, restored=restored)

    machine = await qemu_host.create(BUILT_IN)
    await machine.start(["python", "-c", _DRAW])
    while len(await _drawn(machine)) < 20:
        pass
    with monkeypatch.context() as patched:
        patched.setattr(Vm, "renew", late)
        copies = [machine, *await machine.fork(2)]
    drawn = [await _drawn(each) for each in copies]
    shared = set(drawn[0]) & set(drawn[1])
    async with asyncio.timeout(LONG_S):
        while any(len(numbers.keys() - shared) < 20 for numbers in drawn):
            drawn = [await _drawn(each) for each in copies]
    assert shared and all(set(one) & set(other) == shared for one, other in itertools.combinations(drawn, 2))
    for numbers in drawn[1:]:
        before = [began for number, (began, _) in numbers.items() if number in shared]
        after = [ended for number, (_, ended) in numbers.items() if number not in shared]
        assert min(after) - max(before) > 0.9 * late_s, "the process stood still until then"
    await asyncio.gather(*(each.close() for each in copies))


async def test_a_cancelled_fork_leaves_no_machine(qemu_host: QemuHost, machine: QemuMachine) -> None:  # noqa: F811
    assert await machine.fork(0) == []
    before, files = set(qemu_host._running), set(os.listdir("/proc/self/fd"))
    forking = asyncio.create_task(machine.fork(2))
    while qemu_host._running == before:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert qemu_host._running == before and set(os.listdir("/proc/self/fd")) <= files


async def test_a_cancelled_snapshot_leaves_no_file_and_the_guest_running(machine: QemuMachine) -> None:
    files = sorted(os.listdir("/proc/self/fd"))
    for wait_s in (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05):
        saving = asyncio.create_task(machine.snapshot())
        await asyncio.sleep(wait_s)
        saving.cancel()
        await asyncio.wait([saving])
        if not saving.cancelled():  # it was faster
            saving.result().state.close()
        assert sorted(os.listdir("/proc/self/fd")) == files
    assert (await machine.exec(["true"], timeout_s=LONG_S)).exit_code == 0


async def test_a_snapshot_outlives_its_machine(qemu_host: QemuHost) -> None:  # noqa: F811
    original = await qemu_host.create(BUILT_IN, {"main.py": b"x = 1\n"})
    snapshot = await original.snapshot()
    assert isinstance(snapshot.state, Saved)
    await original.close()
    restored = await qemu_host.create(BUILT_IN, {"extra": b"e"}, snapshot=snapshot)
    assert (await restored.read("main.py"), await restored.read("extra")) == (b"x = 1\n", b"e")
    await restored.close()
    await qemu_host.release(snapshot)
    with pytest.raises(MachineError, match="not made by a virtual machine"):
        await qemu_host.create(BUILT_IN, snapshot=Snapshot(BUILT_IN, b"something else"))


async def test_a_state_that_does_not_load_is_a_ruined_machine(qemu_host: QemuHost) -> None:  # noqa: F811
    """A guest can write what makes QEMU refuse its own state. Here the state is damaged instead."""
    original = await qemu_host.create(BUILT_IN)
    snapshot = await original.snapshot()
    await original.close()
    files = set(os.listdir("/proc/self/fd"))
    saved = snapshot.state
    saved.devices = saved.devices[: len(saved.devices) // 2]
    restored = await qemu_host.create(BUILT_IN, snapshot=snapshot)
    assert (await restored.exec(["true"])).stopped == "machine"
    with pytest.raises(FileNotFoundError):
        await restored.read("main.py")
    await restored.close()
    assert set(os.listdir("/proc/self/fd")) <= files
    await qemu_host.release(snapshot)


async def test_a_paused_machine_stands_still_and_goes_on(machine: QemuMachine) -> None:
    counter = await machine.start(
        ["python", "-u", "-c", "import time\nfor i in range(10**9): print(i); time.sleep(.01)"]
    )
    while not (await counter.state()).output:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await machine.pause()
    stat = Path(f"/proc/{machine.vm.process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":  # noqa: ASYNC110  the kernel has stopped QEMU itself
        await asyncio.sleep(0.01)
    ticks = _cpu_ticks(machine)
    await asyncio.sleep(0.5)
    used = _cpu_ticks(machine) - ticks
    await machine.resume()
    assert used <= 2
    assert (await counter.stop()).exit_code == -signal.SIGKILL


def _cpu_ticks(machine: QemuMachine) -> int:
    fields = Path(f"/proc/{machine.vm.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_what_survives_its_command_or_burns_harms_no_other_command(
    qemu_host: QemuHost,  # noqa: F811
) -> None:
    """As in namespace machines: marks cannot be forged, the first process packs, a busy neighbour takes no time."""
    machine, burner = [await qemu_host.create(BUILT_IN) for _ in range(2)]
    servers = [await machine.start(["sleep", "600"]) for _ in range(2)]
    await run_python(machine, FORGE)
    assert await run_python(machine, COUNT) == "4", "the agent, the servers and the one that counts"
    hide = "mkdir packed closed; echo x > packed/x; ln -s /etc/passwd packed/link; chmod 0 closed"
    assert (await machine.exec(["sh", "-c", hide], timeout_s=LONG_S)).exit_code == 0
    packed = await machine.pack(WORK, max_bytes=1 << 24, timeout_s=LONG_S, whole=False)
    assert {"packed/x", "packed/link"} <= {
        entry.name.removeprefix("./") for entry in Tar(io.BytesIO(packed), most_bytes=1 << 24, most_entries=99)
    }
    await asyncio.gather(*(server.stop() for server in servers))

    await until(await burner.start(["sh", "-c", "yes > /dev/null & yes > /dev/null & echo burning; wait"]), b"burning")
    slept = await machine.exec(["sleep", "600"], timeout_s=2.0)
    assert (slept.stopped, slept.starved) == ("time", False)
    assert await run_python(machine, "print(sum(range(10**5)))", timeout_s=LONG_S) == "4999950000"
    await asyncio.gather(machine.close(), burner.close())


async def test_a_guest_has_no_network_and_no_way_to_its_own_control(machine: QemuMachine) -> None:
    program = """
import json, os, socket
found = {"interfaces": sorted(os.listdir("/sys/class/net")), "opened": [], "user": os.getuid()}
for path in ("/dev/vport0p1", "/dev/vport0p2", "/dev/mem", "/dev/kmsg", "/dev/console", "/proc/1/mem", "/proc/kcore"):
    try:
        open(path, "rb"); found["opened"].append(path)
    except OSError:
        pass
for action in (lambda: os.mkdir("/opt/x"), lambda: os.unlink("/usr/bin/env"), lambda: os.setuid(0),
               lambda: os.kill(1, 9), lambda: os.mknod("node", 0o20666, 0x101), lambda: os.chroot("/tmp")):
    try:
        action(); found["opened"].append("an action")
    except OSError:
        pass
try:
    socket.create_connection(("192.0.2.1", 80), timeout=2); found["opened"].append("network")
except OSError:
    pass
found["code"] = [where for where in ("/init", "/opt/modules", "/opt/layers") if os.path.exists(where)]
found["code"] += os.listdir("/opt/host") if os.path.exists("/opt/host") else []
print(json.dumps(found))
"""
    found = json.loads(await run_python(machine, program))
    assert found == {"interfaces": ["eth0"] * HAS_INTERFACE + ["lo"], "opened": [], "user": 1000, "code": []}


async def test_no_string_of_the_hardware_names_an_emulator(machine: QemuMachine) -> None:
    looked = await fidelity.look(machine)
    found = fidelity.compare(looked, fidelity.ordinary(looked))
    same = {item for item, (distance, _) in found.items.items() if distance == 0}
    assert same >= {"init", "users", "home", "shell history", "clock", "locale"}, found
    told = {difference.fact for difference in found.items["hardware"][1]}
    assert "processor is an emulator" not in told
    assert os.uname().machine != "x86_64" or "maker is an emulator" not in told  # on Arm the device tree says it
    assert found.distance <= 0.17, found


async def test_a_pool_has_guests_ready_and_pauses_those_that_nobody_uses(qemu_host: QemuHost) -> None:  # noqa: F811
    pool = Pool(qemu_host, PoolConfig(ahead=2, pause_after_s=0.1))
    first = await pool.create(BUILT_IN)
    pool.expect(BUILT_IN, 2)
    while pool.counts["ready"] < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    pool.expect(BUILT_IN, 0)
    machines = [first, *[await pool.create(BUILT_IN, {"word": b"w"}) for _ in range(2)]]
    assert pool.counts == {"starting": 0, "ready": 0, "in_use": 3}
    program = "import os, time; print(os.urandom(16).hex(), time.time())"
    values = [(await machine.exec(["python", "-c", program], timeout_s=LONG_S)).output.split() for machine in machines]
    assert len({value[0] for value in values}) == 3
    assert [await machine.read("word") for machine in machines[1:]] == [b"w"] * 2
    while not all(machine._paused for machine in machines):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    (fork,) = await machines[1].fork()
    assert await fork.read("word") == b"w" and (await first.exec(["true"], timeout_s=LONG_S)).exit_code == 0
    await asyncio.gather(*(machine.close() for machine in (*machines, fork)))
    assert pool.counts == {"starting": 0, "ready": 0, "in_use": 0}
    assert pool._tending is not None
    pool._tending.cancel()


_CONNECT = "import socket\ns = socket.create_connection(('127.0.0.1', {port}), timeout=60)\n"


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data.upper())
    writer.close()


async def test_a_program_reaches_the_owner_of_a_port_also_after_a_pause_and_beside_a_fork(
    qemu_host: QemuHost,  # noqa: F811
) -> None:
    machine = await qemu_host.create(BUILT_IN)
    listener, port = await machine.listen()
    other, other_port = await machine.listen()
    assert port != other_port
    program = """
for word in ("hello", "x" * 100000):
    s.sendall(word.encode()); got = b""
    while len(got) < len(word): got += s.recv(65536)
    assert got == word.upper().encode()
    open("said", "a").write("1")
    if word == "hello":
        import os, time
        while not os.path.exists("go"): time.sleep(.02)
print("done")
"""
    async with await asyncio.start_server(_echo, sock=listener):
        talking = await machine.start(["python", "-c", _CONNECT.format(port=port) + program])
        while (await machine.exec(["test", "-e", "said"])).exit_code:
            pass
        await machine.pause()
        await machine.resume()
        (fork,) = await machine.fork()
        await machine.write("go", b"")
        while (state := await talking.state()).exit_code is None:
            pass
        assert (state.exit_code, state.output) == (0, b"done\n")
        # the fork has the program, but nobody is at the other end of its connection, and its ports are closed
        refused = "import socket; print(socket.socket().connect_ex(('127.0.0.1', %d)))"
        assert await run_python(fork, refused % port) == "111"
        again, new_port = await fork.listen()
        async with await asyncio.start_server(_echo, sock=again):
            assert await run_python(fork, _CONNECT.format(port=new_port) + "s.send(b'a'); print(s.recv(9))") == "b'A'"
        await fork.close()
    other.close()
    while await run_python(machine, refused % other_port) != "111":
        pass
    await machine.close()
    with pytest.raises(OSError):
        await machine.listen()


async def test_an_agent_program_in_a_guest_finds_its_model(qemu_host: QemuHost) -> None:  # noqa: F811
    model = ScriptedModel()
    model.answers = [text("x = 1\n"), text("y = 2\n")]
    server = model.server()
    await server.start_server()
    machine = await qemu_host.create(BUILT_IN)
    program = "for n in range(2): open(f'{n}.py', 'w').write(json.loads(ask()[1])['choices'][0]['message']['content'])"
    harness = CommandHarness(CommandConfig(argv=("python", "-c", ASK + program)))
    url = str(server.make_url("/v1"))
    result = await harness.run(Task("t", "do it"), machine, base_url=url, api_key="key", sampling=SAMPLING)
    assert (result.stop, result.turns, result.note) == ("done", 2, "exit code 0")
    assert [await machine.read(f"{n}.py") for n in range(2)] == [b"x = 1\n", b"y = 2\n"]
    await harness.close()
    await machine.close()
    await server.close()


async def test_a_pause_that_is_cancelled_leaves_the_guest_running(machine: QemuMachine) -> None:
    for _ in range(5):
        pausing = asyncio.create_task(machine.pause())
        await asyncio.sleep(0.001)
        pausing.cancel()
        await asyncio.wait([pausing])
        if not pausing.cancelled():
            await machine.resume()
        assert (await machine.exec(["echo", "on"], timeout_s=LONG_S)).output == b"on\n"


async def test_hostile_names_and_kinds_of_files_are_served_or_refused(machine: QemuMachine) -> None:
    program = """
import os
os.makedirs("odd", exist_ok=True)
for name in (b"new\\nline", b"\\xff\\xfe", b"-rf", b" ", "\\u202e\\u2028".encode(), b"a" * 255):
    open(b"odd/" + name, "wb").write(b"content")
os.symlink("/proc/self/mem", "odd/memory"); os.symlink("odd", "odd/loop"); os.mkfifo("odd/pipe")
os.symlink("/dev/zero", "odd/zero"); os.symlink("/dev/vport0p1", "odd/port"); open("odd/sparse", "wb").truncate(1 << 24)
"""
    await run_python(machine, program)
    for name in ("new\nline", "\udcff\udcfe", "-rf", " ", "\u202e\u2028", "a" * 255):
        assert await machine.read(f"odd/{name}") == b"content"
    for name in ("memory", "loop/loop", "pipe", "zero", "port", "sparse", "../../etc/shadow", "a" * 256, "a/" * 3000):
        with pytest.raises(OSError):
            await machine.read(f"odd/{name}")
    for path in ("/usr/bin/env", "/dev/vport0p2", "/proc/sysrq-trigger", "odd/pipe/x", "/opt/new"):
        with pytest.raises(OSError):
            await machine.write(path, b"x")
    assert (await machine.exec(["rm", "-r", "odd"], timeout_s=LONG_S)).exit_code == 0


async def test_a_restored_guest_that_does_not_answer_ruined_itself(qemu_host: QemuHost) -> None:  # noqa: F811
    """Its own commands could have done that: no failure of the infrastructure, so it is graded."""
    machine = await qemu_host.create(BUILT_IN)
    await machine.exec(["true"], timeout_s=LONG_S)
    await machine.pause()
    machine.vm._started.init.shutdown(2)
    await machine.resume()
    assert (await machine.exec(["true"])).stopped == "machine"
    await machine.close()


async def test_a_guest_that_ended_itself_cannot_be_saved_and_that_is_its_own_doing(
    qemu_host: QemuHost,  # noqa: F811
) -> None:
    machine = await qemu_host.create(BUILT_IN)
    await machine.exec(["true"], timeout_s=LONG_S)
    await machine.vm._monitor.ask("quit")  # QEMU exits with 0, as when its guest powers off
    await machine.pause()
    await machine.resume()
    with pytest.raises(OSError) as error:
        await machine.snapshot()
    assert error.value.errno == errno.ESRCH
    assert (await machine.exec(["true"])).stopped == "machine"
    await machine.close()
    saved = await qemu_host.create(BUILT_IN)
    await saved.exec(["true"], timeout_s=LONG_S)
    await saved.vm._monitor.ask("quit")
    with pytest.raises(OSError) as error:
        await saved.snapshot()
    assert error.value.errno == errno.ESRCH
    await saved.close()
    killed = await qemu_host.create(BUILT_IN)
    await killed.exec(["true"], timeout_s=LONG_S)
    killed.vm.process.kill()
    with pytest.raises(MachineError, match="killed with signal 9"):
        await killed.snapshot()
    await killed.close()


async def test_a_machine_can_be_closed_while_it_resumes(qemu_host: QemuHost) -> None:  # noqa: F811
    machine = await qemu_host.create(BUILT_IN)
    await machine.exec(["true"], timeout_s=LONG_S)
    await machine.pause()
    resuming = asyncio.create_task(machine.resume())
    await asyncio.sleep(0)
    await machine.close()
    with pytest.raises(MachineError):
        await resuming


async def test_a_qemu_that_someone_kills_is_an_infrastructure_failure(qemu_host: QemuHost) -> None:  # noqa: F811
    machine = await qemu_host.create(BUILT_IN)
    running = asyncio.create_task(machine.exec(["sleep", "100"], timeout_s=LONG_S))
    await asyncio.sleep(0.5)
    machine.vm.process.kill()
    with pytest.raises(MachineError, match="killed with signal 9"):
        await running
    await machine.close()


async def test_qemu_has_no_rights_of_ours(machine: QemuMachine) -> None:
    status = Path(f"/proc/{machine.vm.process.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
    if os.geteuid() == 0:
        assert "0" not in fields["Uid"].split() and int(fields["CapEff"], 16) == 0 and not fields["Groups"].strip()


async def test_no_machine_outlives_a_dispatcher_that_is_killed(qemu_host: QemuHost) -> None:  # noqa: F811
    program = """
import asyncio
from rollmill.machines.qemu.host import QemuHost
from tests.machines.virtual import CONFIG
async def main():
    machine = await QemuHost(CONFIG).create("host-python")
    print(machine.vm.process.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    dispatcher = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program], stdout=subprocess.PIPE
    )
    assert dispatcher.stdout is not None
    pid = int(await asyncio.to_thread(dispatcher.stdout.readline))
    assert Path(f"/proc/{pid}").exists()
    dispatcher.kill()
    dispatcher.wait()
    dispatcher.stdout.close()
    for _ in range(200):
        if not _alive(pid):
            break
        await asyncio.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_qemu_that_cannot_be_handed_its_files_leaves_none_open(qemu_host: QemuHost) -> None:  # noqa: F811
    shape = (await qemu_host.template(load_image(BUILT_IN, None))).shape
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fill = [os.open(os.devnull, os.O_RDONLY)]
    while fill[-1] <= highest:
        fill.append(os.open(os.devnull, os.O_RDONLY))
    before = set(os.listdir("/proc/self/fd"))
    for more in range(1, 12):  # 4 pairs of sockets, 2 memory files, and one of them twice
        memory = ram.create(4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fill[-1] + 1 + more, hard))
        try:
            with pytest.raises(MachineError, match="Too many open files"):
                start(shape, memory, None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert set(os.listdir("/proc/self/fd")) <= before
    for file in fill:
        os.close(file)


async def test_the_host_leaves_no_process_and_no_file(qemu_host: QemuHost) -> None:  # noqa: F811
    host = QemuHost(CONFIG)
    before = set(os.listdir("/proc/self/fd"))
    machine = await host.create(BUILT_IN)
    (fork,) = await machine.fork()
    pids = [machine.vm.process.pid, fork.vm.process.pid]
    await fork.close()
    await host.close()
    await machine.close()
    assert not any(map(_alive, pids))
    assert set(os.listdir("/proc/self/fd")) <= before
