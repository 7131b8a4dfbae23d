"""The worker: holds submitted code, and does with it what a tester in another machine asks. Its text runs in a machine.

Nothing in its process or machine is secret, and nothing that it says is more than a value: it may be taken over.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import operator
import os
import sys
import types
from typing import Any

from rollmill.environments.rewards.apart.wire import Link, connect

_PRINTED = 1 << 15  # characters that travel with one answer
_OPERATIONS = {
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains", "eq", "lt", "le")},
    **{name: getattr(operator, name) for name in ("gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod")},
    **{name: getattr(operator, name) for name in ("pow", "matmul", "neg", "pos", "abs", "invert", "and_", "or_")},
    **{name: getattr(operator, name) for name in ("xor", "lshift", "rshift", "index", "iadd", "isub", "imul", "ior")},
    **{each.__name__: each for each in (len, iter, next, reversed, str, repr, bool, hash, format, divmod, round, dir)},
    **{each.__name__: each for each in (int, float, getattr, setattr, delattr)},
    "copy": lambda value: importlib.import_module("copy").copy(value),
    "deepcopy": lambda value: importlib.import_module("copy").deepcopy(value),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, kind, error, trace: type(value).__exit__(value, kind, error, None),
    "fspath": os.fspath,
    "radd": lambda value, other: other + value,
    "rsub": lambda value, other: other - value,
    "rmul": lambda value, other: other * value,
    "rtruediv": lambda value, other: other / value,
}
_PLAIN = (int, float, str, bytes, list, tuple, dict, set, frozenset)


class _Test:
    """Stands for an object of the test."""

    def __init__(self, worker: Worker, number: int, facts: Any) -> None:
        self.__dict__.update(_worker=worker, _number=number)

    def _ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        return self._worker.request(name, self, *arguments)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __iter__(self) -> Any:
        steps = self._ask("iter")
        while True:
            try:
                yield steps._ask("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._ask("next")

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __contains__(self, key: Any) -> bool:
        return bool(self._ask("contains", key))

    def __enter__(self) -> Any:
        return self._ask("enter")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self._ask("exit", None, None, None)

    def __str__(self) -> str:
        return str(self._ask("str"))

    __repr__ = __str__


class Worker(Link):
    def __init__(self, port: int, paths: list[str]) -> None:
        super().__init__(connect(port))
        self._tests: dict[int, _Test] = {}
        self._classes: dict[type, Any] = {}
        self._printed = sys.stdout, sys.stderr
        self._loop: Any = None
        sys.path[:0] = paths
        self._hear()

    def _hear(self) -> None:
        self._printed = io.StringIO(), io.StringIO()
        sys.stdout, sys.stderr = self._printed

    # what is told about objects

    def own(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return {"kind": "module", "name": value.__name__}
        kind = "coroutine" if isinstance(value, types.CoroutineType) else "object"
        if isinstance(value, type):
            return {"kind": "class", "class": self._class(value)}
        facts = {"kind": kind, "class": self._class(type(value))}
        base: Any = next((each for each in _PLAIN if isinstance(value, each)), None)
        if base is not None:  # a named tuple, a member of an IntEnum: its plain part, whatever its class overrides
            facts["plain"] = self.encode(base.__new__(base, value) if base not in (list, dict, set) else base(value))
        return facts

    def reference(self, value: Any) -> Any:
        if isinstance(value, type) and value.__module__ == "builtins":
            return ["global", "builtins", value.__name__]
        return super().reference(value)

    def decode(self, coded: Any, mutable: Any = None) -> Any:
        if isinstance(coded, list) and coded and coded[0] == "global":
            return operator.attrgetter(coded[2])(importlib.import_module(coded[1]))
        return super().decode(coded, mutable)

    def _class(self, kind: type) -> Any:
        """What a stand-in for a class must have: its name, its bases, and what Python looks up in classes only."""
        if kind in self._classes:
            return self._classes[kind]
        ours = [base for base in kind.__bases__ if base is not object]
        own = [each for each in kind.__mro__ if each is not object and each not in _PLAIN]
        facts: dict[str, Any] = {
            "number": self.keep(kind),
            "name": kind.__name__,
            "module": str(kind.__module__),
            "bases": [[base.__module__, base.__qualname__, None] for base in ours],
            "special": sorted({name for each in own for name in vars(each) if name.startswith("__")}),
        }
        self._classes[kind] = facts
        for entry, base in zip(facts["bases"], ours):  # noqa: B905
            entry[2] = self._class(base)
        return facts

    def foreign(self, number: int, facts: Any) -> Any:
        if number not in self._tests:
            self._tests[number] = _Test(self, number, facts)
        return self._tests[number]

    def home(self, value: Any) -> Any:
        return value.__dict__["_number"] if type(value) is _Test else None

    def raised(self, error: BaseException) -> Any:
        there = error.__dict__.get("_rollmill_test")
        if there is not None:
            return {"home": there}
        facts = {"class": self._class(type(error)), "arguments": self.encode(tuple(error.args)), "text": _text(error)}
        facts["object"] = self.reference(error)
        facts["attributes"] = [
            [name, self.encode(value)]
            for name, value in vars(error).items()
            if value is None or type(value) in (bool, int, float, str, list, dict, tuple)
        ]
        return facts

    def raise_again(self, told: Any) -> BaseException:
        kind: Any = getattr(importlib.import_module("builtins"), str(told["name"]), Exception)
        error: BaseException = kind.__new__(kind)
        error.args = self.decode(told["arguments"])
        error.__dict__["_rollmill_test"] = told["object"]
        return error

    def before(self) -> Any:
        texts = [each.getvalue()[:_PRINTED] if isinstance(each, io.StringIO) else "" for each in self._printed]
        if any(texts):
            self._hear()
        return texts

    def after(self, told: Any) -> None:
        if told is not None:
            os.environ.clear()
            os.environ.update(told)

    # what the tester asks

    def serve(self, name: str, arguments: list[Any]) -> Any:
        if name == "call":
            function, given, named = arguments
            return function(*given, **named)
        if name == "import":
            return importlib.import_module(arguments[0])
        if name == "find":
            return importlib.util.find_spec(arguments[0]) is not None
        if name == "names":
            return [str(each) for each in vars(arguments[0])]
        if name == "program":
            return self._run_program(*arguments)
        if name == "await":
            import asyncio

            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(_whole(arguments[0]))
        return _OPERATIONS[name](*arguments)

    def _run_program(self, command: Any, directory: Any, given: Any, joined: bool, shell: bool, limit_s: Any) -> Any:
        """Run a program of the submission. Its exit code, and what it printed."""
        import subprocess

        into = subprocess.STDOUT if joined else subprocess.PIPE
        done = subprocess.run(
            command, cwd=directory, input=given, stdout=subprocess.PIPE, stderr=into, shell=shell, timeout=limit_s
        )
        return done.returncode, done.stdout, done.stderr


async def _whole(value: Any) -> Any:
    return await value


def _text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:
        return ""


def main() -> None:
    work = json.load(sys.stdin)
    os.chdir(work["directory"])
    worker = Worker(work["port"], work["paths"])
    sys.stdin = io.StringIO()
    worker.run()
    os._exit(0)


if __name__ == "__main__":
    main()
