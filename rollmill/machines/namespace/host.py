"""The machine host: a single-threaded process that creates machines on request and ends them.

It waits for two things: a message from the client on the control socket, and the end of a machine's pid 1. If the
client is gone (end of file), all machines end. When pid 1 ends, the kernel kills everything else in the machine.

Machines are clones of cloners (slot.py), and these are copies of this process. A few machines are made ahead, while
nobody waits for this process: then a caller does not wait for the set-up.

    client: {"op": "create", "id": 7}   host: {"id": 7} + the machine's socket, or {"id": 7, "error": "…"}
    client: {"op": "close", "id": 7}    host: {"closed": 7, "killed": …} once no process of the machine is left
    client: {"op": "share", "id": 9, "parent": 7, "children": [8]}
                                        host: {"shared": 9, "error": …}: 8 has the files of 7 (forks.py), or why not

`killed`: someone outside has killed the machine. Nothing inside can: the kernel shields pid 1 from its own tree, and
where it kills for lack of memory, it says so.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from rollmill.machines.guest import agent, cgroups, image_root, layout, seccomp
from rollmill.machines.guest import linux as kernel
from rollmill.machines.namespace import forks, inodes
from rollmill.machines.namespace.slot import Cloner, usable_groups

# Real user ids of machines count down from here: above every range that systems hand out (systemd's ends at
# 0x6FFFFFFF). Two per machine: one for pid 1, one for its commands, because the kernel counts processes by user id.
_HIGHEST_USER = 0x70010000
_HIGHEST_RANGE = 0x7FFE0000  # users of images count up from _HIGHEST_USER to here, 65,536 per slot
_AHEAD = 8  # machines that are made ahead
_CORES = os.cpu_count() or 1
_AT_ONCE = max(4, min(_CORES // 2, _AHEAD))  # of them are made at the same time, at most
_CLONERS = 32  # of slots that nobody uses; each holds about a megabyte
_END_EVERY_S = 0.1  # a cloner that nobody needs
_EXITING = 4  # a flag in /proc/PID/stat: the process is ending
_PER_NAMESPACE_COUNTS = (5, 14)  # the first kernel that counts a user's processes per user namespace


class _Slot:
    """A place for one machine at a time: its own user ids, control groups and cloner."""

    def __init__(self, number: int, group: cgroups.Slot | None) -> None:
        self.number = number
        self.group = group
        self.cloner: Cloner | None = None


class _Machine(NamedTuple):
    pid: int
    pidfd: int
    slot: _Slot
    tree: forks.Tree
    client_end: int  # an open file, until the client has it
    memory_kills: int = 0  # of its slot, before it


class Host:
    def __init__(self, state: dict[str, Any]) -> None:
        self._control = socket.socket(fileno=state["control"])
        self._identities: int = state["identities"]
        self._groups = usable_groups(cgroups.Groups(*state["groups"]) if state["groups"] else None)
        self.image = None if state["image"] is None else image_root.ImageRoot(*state["image"])
        if self.image is not None and 1 < self._identities < _HIGHEST_USER + image_root.COUNT:
            raise OSError(errno.ENOSPC, f"an OCI image needs 65536 users; this host has {self._identities} in all")
        memory_counted = self._groups is not None and "memory" in self._groups.controllers
        self._limits = agent.Limits(
            **state["limits"],
            emulation=state["emulation"],
            image=self.image,
            own_user=self._identities > 1,
            memory_counted=memory_counted,
            apart=memory_counted and self._groups is not None and self._groups.apart,
            count_processes=self._counts_processes(),
            filter=seccomp.prepare(seccomp.build(memory_counted=memory_counted)),
        )
        self._plan = agent.Plan.of(self._limits)
        self._forks = self._usable_forks()
        self._own_devices = self._holds_devices()
        self._own_files = self._separates()
        self._selector = selectors.DefaultSelector()
        self._machines: dict[int, _Machine] = {}  # by the client's identifier
        self._identifiers: dict[int, int] = {}  # pid -> identifier
        self._ending: set[int] = set()  # pids that we kill ourselves
        self._killed: set[int] = set()  # identifiers of machines that someone else killed, until the client asks
        self._spare: list[_Machine] = []  # oldest first
        self._making_ahead = False
        self._free: list[_Slot] = []  # the last one is used next
        self._bare: list[_Slot] = []  # free too, without a cloner
        self._end_at = 0.0  # the next cloner that nobody needs
        self._slots = 0

    def run(self) -> None:
        """Serve until the client is gone: it closed its end, or it was killed while it was being written to."""
        try:
            self._serve()
        except ConnectionError:
            pass
        finally:
            self._shut_down()

    def _serve(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        self._send({"ready": True, "limits": self._describe_limits()})
        while True:
            wait_s = _END_EVERY_S if len(self._free) > self._most_free() else None
            events = self._selector.select(0 if self._making_ahead else wait_s)
            if not events and self._making_ahead:
                self._make_ahead()
            self._end_a_cloner()
            for key, _ in events:
                if key.data is not None:
                    self._reap(key.data)
                elif not self._handle(self._control.recv(1 << 16)):
                    return

    def _handle(self, message: bytes) -> bool:
        if not message:
            return False
        request = json.loads(message)
        if request["op"] == "create":
            self._create(request["id"])
        elif request["op"] == "share":
            self._share(request["id"], request["parent"], request["children"])
        elif machine := self._machines.get(request["id"]):
            if not _is_ending(machine.pid):
                self._ending.add(machine.pid)
            _kill(machine.pidfd)
        else:  # it has already ended
            self._send({"closed": request["id"], "killed": request["id"] in self._killed})
            self._killed.discard(request["id"])
        return True

    def _create(self, identifier: int) -> None:
        try:
            alive = (spare for spare in self._spare if not _is_readable(spare.pidfd))  # `_reap` handles the others
            machine = next(alive, None)
            if machine is None:
                machine = self._make_now()
        except OSError as error:
            self._send({"id": identifier, "error": str(error)})
            return
        self._spare.remove(machine)
        self._machines[identifier] = machine
        self._identifiers[machine.pid] = identifier
        try:
            self._send({"id": identifier}, machine.client_end)
        finally:
            os.close(machine.client_end)
        self._making_ahead |= len(self._spare) < _AHEAD // 2

    def _make_now(self) -> _Machine:
        """Somebody waits for a machine. If there are further messages, others may wait too."""
        try:
            self._make_spares(min(_CORES, _AT_ONCE) if _is_readable(self._control.fileno()) else 1)
        except OSError:
            if not self._spare:
                raise
        return self._spare[-1]

    def _share(self, number: int, parent: int, children: list[int]) -> None:
        machines = [self._machines.get(identifier) for identifier in (parent, *children)]
        error = None
        try:
            trees = [machine.tree for machine in machines if machine is not None]
            if self._forks is None or len(trees) < len(machines):
                raise OSError("no such machine, or this host cannot")
            self._forks.share(trees[0], trees[1:])
        except OSError as problem:
            error = str(problem)
        except forks.Lost as problem:
            error = str(problem)
            _kill(self._machines[parent].pidfd)
        self._send({"shared": number, "error": error})

    def _make_ahead(self) -> None:
        """Make a few more. At a failure this stops: if the reason persists, the next create reports it."""
        try:
            self._make_spares(min(_AT_ONCE, _AHEAD - len(self._spare)))
            self._making_ahead = len(self._spare) < _AHEAD
        except OSError:
            self._making_ahead = False

    def _make_spares(self, count: int) -> None:
        """Make machines, at the same time. OSError: not all could be made."""
        slots: list[_Slot] = []
        problems: list[OSError] = []
        for _ in range(count):
            try:
                slots.append(self._next_slot())
            except OSError as error:
                problems.append(error)
        for step in (self._begin_cloner, self._ask, self._take_spare):
            left = []
            for slot in slots:
                try:
                    step(slot)
                    left.append(slot)
                except OSError as error:
                    self._free.append(slot)
                    problems.append(error)
            slots = left
        if problems:
            raise problems[-1]

    def _ask(self, slot: _Slot) -> None:
        self._cloner_of(slot).ask()

    def _take_spare(self, slot: _Slot) -> None:
        machine = self._take(slot)
        self._spare.append(machine)
        self._selector.register(machine.pidfd, selectors.EVENT_READ, machine)

    def _cloner_of(self, slot: _Slot) -> Cloner:
        """The cloner of a slot, ready."""
        cloner = self._begin_cloner(slot)
        try:
            cloner.prepare()
        except OSError:
            slot.cloner = None
            raise
        return cloner

    def _begin_cloner(self, slot: _Slot) -> Cloner:
        if slot.cloner is None:
            identify = partial(self._map_identity, user=self._user_of(slot.number), number=slot.number)
            if self._own_devices:
                inodes.make_devices(slot.number)
            with self._users_of(slot.number) as users:
                slot.cloner = Cloner(
                    self._plan, slot.group, identify, slot.number, own_files=self._own_files, users=users
                )
        return slot.cloner

    @contextlib.contextmanager
    def _users_of(self, number: int) -> Iterator[int | None]:
        """An open user namespace whose users 0 to 65,535 are those of a slot's image; None without an image, or where
        there is one user."""
        if self.image is None or self._identities == 1:
            yield None
            return
        lines = f"0 {self._range_of(number)} {image_root.COUNT}"
        users = image_root.open_users(lambda pid: image_root.map_range(pid, lines))
        try:
            yield users
        finally:
            os.close(users)

    def _take(self, slot: _Slot) -> _Machine:
        """The machine that the cloner of a slot was asked for."""
        cloner = self._cloner_of(slot)
        try:
            pid, pidfd, client_end = cloner.take()
        except ConnectionError:  # someone has killed it: the next one makes the machine
            cloner.end()
            slot.cloner = None
            cloner = self._cloner_of(slot)
            cloner.ask()
            pid, pidfd, client_end = cloner.take()
        tree = forks.Tree(pid, self._user_of(slot.number), slot)
        kills = slot.group.memory_kills() if slot.group else 0
        return _Machine(pid, pidfd, slot, tree, client_end, kills)

    def _user_of(self, number: int) -> int:
        """The real user id of the commands of a slot; one less is that of pid 1."""
        return 0 if self._identities == 1 else min(self._identities, _HIGHEST_USER) - 1 - 2 * number

    def _range_of(self, number: int) -> int:
        """The first real user id of the users of a slot's image."""
        first = _HIGHEST_USER + number * image_root.COUNT
        if first + image_root.COUNT > min(self._identities, _HIGHEST_RANGE):
            raise OSError(errno.EAGAIN, "this host has no more user ids for machines with an OCI image")
        return first

    def _map_identity(self, pid: int, user: int, number: int = 0) -> None:
        pid_one = "" if self._identities == 1 else f"0 {user - 1} 1\n"
        if self.image is None:
            return image_root.map_range(pid, f"{pid_one}{layout.USER_ID} {user} 1\n")
        if self._identities == 1:
            return image_root.map_range(pid, f"{self.image.user} 0 1\n", f"{self.image.group} 0 1\n")
        its = f"{image_root.SHIFT} {self._range_of(number)} {image_root.COUNT}\n"
        image_root.map_range(pid, pid_one + its)

    def _next_slot(self) -> _Slot:
        for free in (self._free, self._bare):
            if free:
                return free.pop()
        number = self._slots
        self._slots += 1
        return _Slot(number, self._groups.make_slot(number) if self._groups else None)

    def _most_free(self) -> int:
        """How many slots that nobody uses keep their cloner: as many as are in use, so that a wave finds them."""
        return max(_CLONERS, len(self._machines))

    def _end_a_cloner(self) -> None:
        """One after the other, so that nobody waits for many of them."""
        if time.monotonic() < self._end_at or len(self._free) <= self._most_free():
            return
        self._end_at = time.monotonic() + _END_EVERY_S
        slot = self._free.pop(0)
        if slot.cloner is not None:
            slot.cloner.end()
            slot.cloner = None
        self._bare.append(slot)

    def _reap(self, machine: _Machine) -> None:
        self._selector.unregister(machine.pidfd)
        identifier = self._identifiers.pop(machine.pid, None)
        killed = self._discard(machine)
        if identifier is None:
            self._spare.remove(machine)
            os.close(machine.client_end)
            return
        del self._machines[identifier]
        if killed:
            self._killed.add(identifier)
        with contextlib.suppress(OSError):  # if the client is gone, the next receive notices
            self._send({"closed": identifier, "killed": killed})

    def _discard(self, machine: _Machine) -> bool:
        """End a machine. Returns whether someone outside had killed it."""
        _kill(machine.pidfd)
        _, status = os.waitpid(machine.pid, 0)
        os.close(machine.pidfd)
        left = [machine.tree] if self._forks is None else self._forks.leave(machine.tree)
        for tree in left:
            self._free.append(tree.slot)
        asked = machine.pid in self._ending
        self._ending.discard(machine.pid)
        kills = machine.slot.group.memory_kills() if machine.slot.group else 0
        return not asked and kills == machine.memory_kills and os.waitstatus_to_exitcode(status) == -signal.SIGKILL

    def _shut_down(self) -> None:
        for machine in [*self._machines.values(), *self._spare]:
            self._discard(machine)
        for slot in self._free:
            if slot.cloner is not None:
                slot.cloner.end()
        if self._groups is not None:
            self._groups.remove()

    def _send(self, message: dict[str, Any], handed_over: int | None = None) -> None:
        files = [] if handed_over is None else [handed_over]
        socket.send_fds(self._control, [json.dumps(message).encode()], files)

    def _counts_processes(self) -> bool:
        return self._identities > 1 or kernel.version() >= _PER_NAMESPACE_COUNTS

    def _usable_forks(self) -> forks.Forks | None:
        """Only where a control group counts what frozen layers hold."""
        if self._identities == 1 or not self._limits.memory_counted or self.image is not None:
            return None
        try:
            usable = forks.Forks(self._plan.mounts[0])
        except OSError:
            return None
        return usable if usable.works((self._user_of(0), self._user_of(1)), self._map_identity) else None

    def _holds_devices(self) -> bool:
        try:
            inodes.hold_devices()
            inodes.make_devices(0)
        except OSError:
            return False
        return True

    def _separates(self) -> bool:
        """Whether a slot can have files on inodes of its own."""
        try:
            with self._users_of(0) as users:
                identify = partial(self._map_identity, user=self._user_of(0))
                cloner = Cloner(self._plan, None, identify, 0, own_files=True, users=users)
                cloner.prepare()
                cloner.end()
        except OSError as error:
            if self.image is not None and self._identities > 1:
                raise OSError(
                    error.errno, f"the files of an OCI image cannot get other owners: {error.strerror}"
                ) from None
            return False
        return True

    def _describe_limits(self) -> dict[str, Any]:
        """What bounds a machine on this host. `rollmill doctor` shows it."""
        return {
            "control_groups": self._groups.controllers if self._groups else [],
            "process_rlimit": self._limits.count_processes,
            "seccomp": self._limits.filter is not None,
            "private_devices": self._own_devices,
            "private_files": self._own_files,
            "separate_users": self._identities > 1,
            "shared_forks": self._forks is not None,
        }


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _is_readable(file: int) -> bool:
    """Of a machine's pidfd: it has ended. Of a socket: there is a message."""
    poll = select.poll()  # not `select`: it takes no number from 1,024 on, and a few hundred machines reach that
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def _is_ending(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return bool(int(file.read().rpartition(b")")[2].split()[6]) & _EXITING)
    except OSError:
        return True


def _prepare_process() -> None:
    """What machines inherit, so that each of them does not have to do it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with Python's handler a command could interrupt pid 1
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each machine takes about five here; commands get a limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):  # 2 tells the client what went wrong
        os.dup2(nothing, standard)
    os.close(nothing)


def _hint(facts: dict[str, Any]) -> str | None:
    if facts["image"] is None:
        return None
    return (
        "an OCI image needs Linux 6.6, and $ROLLMILL_IMAGES on a file system that knows mapped owners: ext4, xfs, btrfs"
    )


def main(state: str) -> None:
    _prepare_process()
    sys.path = [path for path in sys.path if path not in (layout.CODE, "")]
    for name in ("LC_CTYPE", "LD_BIND_NOW"):  # Python set the first under the C locale; commands must not see them
        os.environ.pop(name, None)
    kernel.unmount(layout.CODE)
    facts = json.loads(state)
    try:
        host = Host(facts)
    except OSError as error:
        control = socket.socket(fileno=facts["control"])
        control.send(json.dumps({"error": f"cannot make machines: {error.strerror}", "hint": _hint(facts)}).encode())
        return
    if facts["packages"]:  # last: nothing of an image is imported into this process or into pid 1
        sys.path.append(layout.PACKAGES)
        os.environ["PYTHONPATH"] = layout.PACKAGES
    if host.image is not None:
        image_root.live_in(host.image)
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]  # programs in the machines must not find these modules
    # machines are copies of this process, so its garbage would be copied into each of them
    gc.collect()
    gc.freeze()
    host.run()
