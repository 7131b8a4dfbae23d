"""Forks share the files of their parent: nothing is copied, however large the work directory is.

A work directory begins as a file system in memory that its machine mounted. When the machine forks, the machine host
freezes that file system: it becomes a read-only layer. Parent and children each get an overlay of that layer and of an
empty layer of their own, into which they write. The next fork freezes the layer on top, and so on:

    parent:  [c] [b] [a]      a: frozen at the first fork, b: at the second, c: what the parent has written since
    child:   [d] [b] [a]      made by the second fork

Layers are mounted in a namespace that no machine sees. Their files belong to user 1000 there; each machine sees them
through mounts that map this user to its own real user id. What a layer holds stays counted in the control group of the
machine that wrote it, so `Host` gives that group to no other machine while the layer exists.

A machine can fork in this way only while none of its processes uses the work directory: otherwise the kernel refuses to
unmount it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from typing import Any

from rollmill.machines.guest import layout
from rollmill.machines.guest import linux as kernel

_PLACE = "/tmp"  # noqa: S108  of the layers, in their own mount namespace
_STAGE, _WHOLE = f"{_PLACE}/stage", f"{_PLACE}/stage/whole"  # where an overlay is put together
_UPPER, _SCRATCH = "upper", "scratch"  # directories of a layer that the machine host mounted
_MOST = 32  # layers of one machine: the kernel looks for a file in one after the other
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
# Directories can be renamed. A hard link to a file of a frozen layer becomes a file of its own when it is written to.
_OPTIONS = "redirect_dir=on,index=off,metacopy=off,xino=on"
_OVERLAY_NEEDS = (
    kernel.CAP_CHOWN,
    kernel.CAP_DAC_OVERRIDE,
    kernel.CAP_DAC_READ_SEARCH,
    kernel.CAP_FOWNER,
    kernel.CAP_FSETID,
    kernel.CAP_SYS_ADMIN,
)
Mount = tuple[str, str, str | None, int, str]  # arguments of kernel.mount


class Lost(Exception):
    """The parent has no work directory any more."""


class Layer:
    def __init__(self, number: int, writer: Tree, *, own: bool) -> None:
        self.writer = writer  # its control group counts what the layer holds
        self.own = own  # mounted by the machine host, not by the writer in its user namespace
        self.users = 1  # trees that have it
        self.mount = f"{_PLACE}/{number}"
        self.files = f"{self.mount}/{_UPPER}" if own else self.mount


class Tree:
    """The work directory of one machine."""

    def __init__(self, pid: int, user: int, slot: Any = None) -> None:
        self.pid = pid  # of the machine's first process
        self.user = user  # real user id of its commands
        self.slot = slot  # what the machine host can give to another machine once nothing of this one is left
        self.layers: list[Layer] = []  # newest first; the first is written to. Empty: it never forked
        self.written = 0  # layers of which it is the writer, frozen or not
        self.ended = False


class Forks:
    """The layers of all machines of a machine host."""

    def __init__(self, work: Mount) -> None:
        """`work`: how a machine mounts its work directory. OSError: the kernel does not allow layers."""
        self._work = work
        self._made = 0
        self._own = _namespace_of("self")
        kernel.unshare(kernel.CLONE_NEWNS)
        try:
            self._namespace = _namespace_of("self")
            kernel.mount("tmpfs", _PLACE, "tmpfs", _FLAGS, "mode=700")
            os.makedirs(_WHOLE)
        finally:
            self._come_back()

    def share(self, parent: Tree, children: list[Tree]) -> None:
        """Give each child the files of the parent, in the place of its own. OSError: not all have got them."""
        with self._inside(self._namespace):
            changed = _is_changed(parent)
            if changed:
                self._check_room(parent)
        if changed:
            self._freeze(parent)
        frozen = parent.layers[1:]
        for child in children:
            with self._inside(_namespace_of(child.pid), close=True):
                kernel.unmount(layout.WORK, 0)
            child.layers = list(frozen)
            for layer in frozen:
                layer.users += 1
            self._put_up(child)

    def leave(self, tree: Tree) -> list[Tree]:
        """The machine of this tree has ended. Returns the ended trees of which nothing is left."""
        tree.ended = True
        layers, tree.layers = tree.layers, []
        for layer in layers:
            layer.users -= 1
        unused = [layer for layer in layers if not layer.users]
        if unused:
            with self._inside(self._namespace):
                for layer in unused:
                    self._remove(layer)
        return [each for each in {tree, *(layer.writer for layer in unused)} if each.ended and not each.written]

    def _check_room(self, parent: Tree) -> None:
        """What is frozen stays in memory even if it is deleted, so it may be as much as one work directory holds."""
        status = [os.statvfs(layer.mount) for layer in parent.layers]
        used = sum((each.f_blocks - each.f_bfree) * each.f_frsize for each in status)
        if len(parent.layers) >= _MOST or any(used > each.f_blocks * each.f_frsize for each in status):
            raise OSError(errno.ENOSPC, "too much is frozen already")

    def _freeze(self, tree: Tree) -> None:
        """Make the newest layer of a tree read-only, and mount the tree with a new one on top. OSError: in use."""
        taken = self._take_down(tree)
        try:
            with self._inside(self._namespace):
                if taken is not None:
                    tree.layers = [self._new_layer(tree, own=False)]
                    kernel.place_mount(taken, tree.layers[0].mount)
                # for everyone: the kernel refuses while any file of it is open for writing
                kernel.mount("none", tree.layers[0].mount, None, kernel.MS_REMOUNT | kernel.MS_RDONLY | _FLAGS)
            self._put_up(tree)
        except OSError as error:
            raise Lost(str(error)) from None
        finally:
            if taken is not None:
                os.close(taken)

    def _take_down(self, tree: Tree) -> int | None:
        """Unmount a work directory, if nobody uses it. Returns an open mount of it if it has no layer yet."""
        with self._inside(_namespace_of(tree.pid), close=True):
            taken = None if tree.layers else kernel.copy_mount(layout.WORK)
            try:
                kernel.unmount(layout.WORK, 0)
            except OSError:
                if taken is not None:
                    os.close(taken)
                raise
        return taken

    def _put_up(self, tree: Tree) -> None:
        """All layers of a tree are frozen, and it is not mounted. Mount it with a new layer on top."""
        users = os.open(f"/proc/{tree.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with self._inside(self._namespace):
                mode = stat.S_IMODE(os.stat(tree.layers[0].files).st_mode)
                top = self._new_layer(tree, own=True)
                tree.layers.insert(0, top)
                _, _, kind, flags, options = self._work
                kernel.mount("tmpfs", top.mount, kind, flags, options)
                for name in (_UPPER, _SCRATCH):
                    os.mkdir(f"{top.mount}/{name}")
                os.chown(top.files, layout.USER_ID, layout.USER_ID)
                os.chmod(top.files, mode)
                whole = self._join(tree, users)
        finally:
            os.close(users)
        try:
            with self._inside(_namespace_of(tree.pid), close=True):
                kernel.place_mount(whole, layout.WORK)
        finally:
            os.close(whole)

    def _join(self, tree: Tree, users: int) -> int:
        """An overlay of all layers of a tree, as an open mount. `users` is the user namespace of the machine."""
        # all mounts on it are taken down with it, in one go: the kernel waits each time
        kernel.mount(_STAGE, _STAGE, None, kernel.MS_BIND)
        try:
            for number, layer in enumerate(tree.layers):
                mount = kernel.copy_mount(layer.files if number else layer.mount)
                try:
                    if layer.own or layer.writer is not tree:  # else its owners are right as they are
                        kernel.map_owners(mount, users)
                    os.makedirs(f"{_STAGE}/{number}", exist_ok=True)
                    kernel.place_mount(mount, f"{_STAGE}/{number}")
                finally:
                    os.close(mount)
            lower = ":".join(f"{_STAGE}/{number}" for number in range(1, len(tree.layers)))
            upper = f"upperdir={_STAGE}/0/{_UPPER},workdir={_STAGE}/0/{_SCRATCH}"
            # what the overlay does with files, it does with the rights that this process has now
            with kernel.files_as(tree.user, *_OVERLAY_NEEDS):
                kernel.mount("overlay", _WHOLE, "overlay", _FLAGS, f"lowerdir={lower},{upper},{_OPTIONS}")
            return kernel.copy_mount(_WHOLE)
        finally:
            kernel.unmount(_STAGE)

    def _new_layer(self, writer: Tree, *, own: bool) -> Layer:
        self._made += 1
        layer = Layer(self._made, writer, own=own)
        os.mkdir(layer.mount)
        writer.written += 1
        return layer

    def _remove(self, layer: Layer) -> None:
        layer.writer.written -= 1
        with contextlib.suppress(OSError):  # it may never have been mounted
            kernel.unmount(layer.mount)
        os.rmdir(layer.mount)

    @contextlib.contextmanager
    def _inside(self, namespace: int, *, close: bool = False) -> Iterator[None]:
        """Be in a mount namespace for a while. Machines cannot change what is mounted in theirs, nor the directories
        above `layout.WORK`."""
        try:
            kernel.enter_mounts(namespace)
            try:
                yield
            finally:
                self._come_back()
        finally:
            if close:
                os.close(namespace)

    def _come_back(self) -> None:
        try:
            kernel.enter_mounts(self._own)
        except OSError:
            os._exit(1)  # the next machine would see what is mounted here

    def works(self, users: tuple[int, int], identify: Callable[[int, int], None]) -> bool:
        """Try it, with two processes that are machines as far as this goes."""
        tries: list[tuple[Tree, socket.socket]] = []
        try:
            for user in users:
                tries.append(self._start(user, identify))
            (parent, _), (child, _) = tries
            self.share(parent, [child])
            return True
        except (OSError, Lost):
            return False
        finally:
            for tree, connection in tries:
                connection.close()
                os.kill(tree.pid, signal.SIGKILL)
                os.waitpid(tree.pid, 0)
                self.leave(tree)

    def _start(self, user: int, identify: Callable[[int, int], None]) -> tuple[Tree, socket.socket]:
        ours, its = socket.socketpair()
        with its:
            pid, pidfd = kernel.clone(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
            if pid == 0:
                ours.close()
                _stand_in(its, self._work)
        os.close(pidfd)
        try:
            identify(pid, user)
            ours.send(b"g")
            if not ours.recv(1):
                raise OSError(errno.EPERM, "a process in a user namespace cannot mount its work directory")
        except OSError:
            ours.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        return Tree(pid, user), ours


def _is_changed(tree: Tree) -> bool:
    """Whether there is anything in the newest layer of a tree."""
    if not tree.layers:
        return True
    top, below = (layer.files for layer in tree.layers[:2])
    return bool(os.listdir(top)) or os.stat(top).st_mode != os.stat(below).st_mode


def _stand_in(connection: socket.socket, work: Mount) -> None:
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        connection.recv(1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        kernel.mount(*work)
        connection.send(b"r")
        connection.recv(1)
    finally:
        os._exit(0)


def _namespace_of(process: int | str) -> int:
    return os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
