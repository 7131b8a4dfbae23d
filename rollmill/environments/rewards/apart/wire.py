"""The wire between a tester and the worker that holds submitted code. Its text runs in machines, from Python 3.8 on.

Both sides send requests, also while they wait for an answer. What is plain travels as data of exact built-in types;
anything else stays where it is, and a number stands for it. Nothing received is ever executed or unpickled.

Each grading starts both programs anew. So they import little at once, and the rest where it is first needed.

    tester                                     worker
    ["?", "call", f, [3], {}]      ──►
                                   ◄──         ["=", 4, changes, printed]      or ["!", exception, changes, printed]

`changes` are lists, dictionaries, sets and byte arrays that the call was given and has changed.
"""

from __future__ import annotations

import importlib
import json
import socket
import struct
import sys
from _thread import RLock
from collections.abc import Callable
from typing import Any

_LARGEST = 1 << 26  # bytes of a message
_SMALL = 1 << 62
_MUTABLE = (list, dict, set, bytearray)


class LinkLost(ConnectionError):
    """The other side has ended, or speaks nonsense."""


def _fields(*names: str) -> Callable[[Any], list[Any]]:
    return lambda value: [getattr(value, name) for name in names]


_DAY, _CLOCK = ("year", "month", "day"), ("hour", "minute", "second", "microsecond", "tzinfo")
_KNOWN: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    # types of the standard library that are plain data, by module and name: of what each is made again
    ("datetime", "date"): _fields(*_DAY),
    ("datetime", "time"): _fields(*_CLOCK),
    ("datetime", "datetime"): _fields(*_DAY, *_CLOCK),
    ("datetime", "timedelta"): _fields("days", "seconds", "microseconds"),
    ("datetime", "timezone"): lambda value: [value.utcoffset(None), value.tzname(None)],
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): _fields("numerator", "denominator"),
    ("builtins", "complex"): _fields("real", "imag"),
    ("builtins", "range"): _fields("start", "stop", "step"),
    ("builtins", "slice"): _fields("start", "stop", "step"),
    ("collections", "deque"): lambda value: [list(value), value.maxlen],
    ("collections", "Counter"): lambda value: [dict(value)],
    ("collections", "OrderedDict"): lambda value: [list(value.items())],
    ("collections", "defaultdict"): lambda value: [None, dict(value)],
    ("pathlib", "PosixPath"): lambda value: [str(value)],
    ("pathlib", "PurePosixPath"): lambda value: [str(value)],
}


def _known(kind: type) -> tuple[str, str] | None:
    """Under which name a type is plain data; None if it is not. A class that only calls itself so is not."""
    name = str(kind.__module__).partition(".")[0], kind.__qualname__
    return name if name in _KNOWN and getattr(sys.modules.get(name[0]), name[1], None) is kind else None


class Link:
    """One end of the wire. `serve` answers requests; `own` and `foreign` turn what is not plain into numbers and back:
    `own(value)` describes an object of this side, `foreign(number, facts)` makes one of the other side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = RLock()
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self.broken = False

    # what each side defines

    def own(self, value: Any) -> Any:
        raise NotImplementedError

    def foreign(self, number: int, facts: Any) -> Any:
        raise NotImplementedError

    def home(self, value: Any) -> Any:
        """The number of a stand-in for an object of the other side; None for anything else."""
        raise NotImplementedError

    def serve(self, name: str, arguments: list[Any]) -> Any:
        raise NotImplementedError

    def raised(self, error: BaseException) -> Any:
        raise NotImplementedError

    def raise_again(self, told: Any) -> BaseException:
        raise NotImplementedError

    def before(self) -> Any:
        """What this side tells with each message besides."""
        return None

    def after(self, told: Any) -> None:
        """Takes in what the other side's `before` told."""

    # requests

    def request(self, name: str, *arguments: Any) -> Any:
        """Ask the other side, and answer it until its answer comes. Raises what was raised there."""
        with self._lock:
            mutable: list[Any] = []
            try:
                message = self._exchange(["?", name, [self.encode(each, mutable) for each in arguments], self.before()])
            except BaseException:  # a time limit may end this anywhere; then the other side waits for ever
                self.broken = True
                raise
            self.after(message[3])
            for index, content in message[2]:
                _replace(mutable[index], self.decode(content))
            if message[0] == "=":
                return self.decode(message[1])
            raise self.raise_again(message[1])

    def _exchange(self, message: Any) -> Any:
        self._send(message)
        while True:
            message = self._receive()
            if message[0] != "?":
                return message
            self._answer(message)

    def run(self) -> None:
        """Answer requests until the other side is gone."""
        while True:
            try:
                message = self._receive()
            except LinkLost:
                return
            self._answer(message)

    def _answer(self, message: Any) -> None:
        _, name, coded, told = message
        mutable: list[Any] = []
        try:
            self.after(told)
            arguments = [self.decode(each, mutable) for each in coded]
            were = [self._data(each, [], ()) for each in mutable]
            mark, value = "=", self.encode(self.serve(name, arguments))
        except BaseException as error:
            mark, value, were = "!", self.raised(error), []
        changes = []
        for index, was in enumerate(were):
            now = self._data(mutable[index], [], ())
            if now != was:
                changes.append([index, now])
        self._send([mark, value, changes, self.before()])

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        try:
            self._connection.sendall(struct.pack(">I", len(data)) + data)
        except OSError as error:
            raise LinkLost(str(error)) from None

    def _receive(self) -> Any:
        (size,) = struct.unpack(">I", self._take(4))
        if size > _LARGEST:
            raise LinkLost("a message that is too large")
        try:
            message = json.loads(self._take(size))
            if type(message) is not list or len(message) != 4 or message[0] not in ("?", "=", "!"):
                raise ValueError
        except (ValueError, RecursionError):
            raise LinkLost("a message that cannot be read") from None
        return message

    def _take(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._connection.recv(min(size - len(parts), 1 << 20))
            except OSError as error:
                raise LinkLost(str(error)) from None
            if not part:
                raise LinkLost("it has ended")
            parts += part
        return bytes(parts)

    # values

    def encode(self, value: Any, mutable: Any = None) -> Any:
        try:
            return self._data(value, [] if mutable is None else mutable, ())
        except (RecursionError, ValueError):  # deep, or in itself
            return self.reference(value)

    def reference(self, value: Any) -> Any:
        number = self.home(value)
        if number is not None:
            return ["home", number]
        return ["away", self.keep(value), self.own(value)]

    def keep(self, value: Any) -> int:
        """The number of an object of this side. It is kept as long as the link is."""
        number = self._numbers.setdefault(id(value), len(self._objects))
        self._objects[number] = value
        return number

    def _data(self, value: Any, mutable: list[Any], inside: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SMALL < value < _SMALL else ["int", hex(value)]
        if kind is float:
            return value if value - value == 0 else ["float", repr(value)]
        if kind is bytes:
            return ["bytes", _as_text(value)]
        if kind in _MUTABLE or kind is tuple or kind is frozenset:
            if id(value) in inside:
                raise ValueError("it holds itself")
            index = len(mutable)
            if kind in _MUTABLE:
                mutable.append(value)
            if kind is bytearray:
                return ["bytearray", index, _as_text(value)]
            inner = (*inside, id(value))
            items = [list(pair) for pair in value.items()] if kind is dict else list(value)
            if kind is dict:
                coded = [[self._data(each, mutable, inner) for each in pair] for pair in items]
            else:
                coded = [self._data(each, mutable, inner) for each in items]
            return [kind.__name__, index, coded]
        name = _known(kind)
        if name is not None:
            return ["known", *name, [self._data(each, mutable, inside) for each in _KNOWN[name](value)]]
        if kind.__module__ == "numpy" and "numpy" in sys.modules:
            array = sys.modules["numpy"].asarray(value)
            if (
                not array.dtype.hasobject
                and (kind.__name__ == "ndarray" or array.ndim == 0)
                and hasattr(value, "dtype")
            ):
                shape = list(array.shape) if kind.__name__ == "ndarray" else None
                return ["numpy", array.dtype.str, shape, _as_text(array.tobytes())]
        return self.reference(value)

    def decode(self, coded: Any, mutable: Any = None) -> Any:
        """ValueError, or any error of a constructor, for what is no value."""
        if not isinstance(coded, list):
            return coded
        tag = coded[0]
        given = [] if mutable is None else mutable
        if tag in ("list", "dict", "set", "bytearray"):
            made: Any = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}[tag]()
            given.append(made)
            if tag == "list":
                made.extend(self.decode(each, given) for each in coded[2])
            elif tag == "dict":
                for key, item in coded[2]:
                    first = self.decode(key, given)
                    made[first] = self.decode(item, given)
            elif tag == "set":
                made.update(self.decode(each, given) for each in coded[2])
            else:
                made += _as_bytes(coded[2])
            return made
        if tag in ("tuple", "frozenset"):
            return (tuple if tag == "tuple" else frozenset)(self.decode(each, given) for each in coded[2])
        if tag == "int":
            return int(coded[1], 16)
        if tag == "float":
            return float(coded[1])
        if tag == "bytes":
            return _as_bytes(coded[1])
        if tag == "known":
            if (coded[1], coded[2]) not in _KNOWN:
                raise ValueError(f"no plain data: {str(coded[1:3])[:50]}")
            kind = getattr(importlib.import_module(coded[1]), coded[2])
            arguments = [self.decode(each, given) for each in coded[3]]
            if coded[2] == "timezone" and arguments[1].startswith("UTC"):
                arguments = arguments[:1]
            return kind(*arguments)
        if tag == "numpy":
            import numpy

            array = numpy.frombuffer(_as_bytes(coded[3]), dtype=numpy.dtype(str(coded[1])))
            return array[0] if coded[2] is None else array.reshape(coded[2]).copy()
        if tag == "home":
            return self._objects[coded[1]]
        if tag == "away":
            return self.foreign(coded[1], coded[2])
        raise ValueError(f"no value: {str(tag)[:50]!r}")


def _as_text(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


def _as_bytes(text: str) -> bytes:
    import base64

    return base64.b64decode(text)


def _replace(old: Any, new: Any) -> None:
    """Give a mutable value of this side the contents that it has on the other side."""
    if type(new) is not type(old):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    else:
        old.clear()
        old.update(new)


def connect(port: int) -> socket.socket:
    connection = socket.socket()  # create_connection would load what looks up names
    connection.connect(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
