"""The tester's side: stand-ins for the modules, classes and objects of a submission, which is in another machine.

The tester is what a verdict comes from. It imports nothing submitted and compares plain data here. The worker may ask
it to call what a test handed over, and to look into objects whose class a test defines, nothing else.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from rollmill.environments.rewards.apart.wire import Link, LinkLost, connect

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "divmod")
_FORWARDED = {
    **{f"__{name}__": name for name in (*_ARITHMETIC, "radd", "rsub", "rmul", "rtruediv", "iadd", "isub", "imul")},
    **{f"__{name}__": name for name in ("len", "iter", "next", "getitem", "setitem", "delitem", "reversed", "enter")},
    **{f"__{name}__": name for name in ("exit", "str", "repr", "bool", "format", "neg", "pos", "abs", "invert")},
    **{f"__{name}__": name for name in ("int", "float", "index", "round", "copy", "deepcopy", "fspath", "ior", "xor")},
    "__and__": "and_",
    "__or__": "or_",
}
_SHOWN = {"__str__": "str", "__repr__": "repr", "__format__": "format"}  # of a value that has a plain part
_COMPARED = {f"__{name}__": name for name in ("lt", "le", "gt", "ge")}
_ASKED = frozenset(
    f"__{name}__" for name in "name qualname doc file version all annotations members dataclass_fields".split()
)
_OF_MOCKS = ("assert", "configure_mock", "attach_mock", "mock_add_spec", "reset_mock")  # a test's own judgement
_TEST_FOLDERS = frozenset({"test", "tests"})
_real_dict: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__


def _forward(operation: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any) -> Any:
        return Tester.now().request(operation, self, *arguments)

    return method


def _compare(operation: str) -> Callable[..., Any]:
    """Two objects of one submitted class are compared there; with anything else only where the task needs it."""

    def method(self: Any, other: Any) -> Any:
        if self is other and operation == "eq":
            return True
        if type(self) is not type(other) and not Tester.now().trusting:
            return NotImplemented
        return Tester.now().request(operation, self, other) is True

    return method


def _attribute(self: Any, name: str) -> Any:
    if name.startswith("_rollmill") or (name.startswith("__") and name not in _ASKED):
        raise AttributeError(name)
    return Tester.now().request("getattr", self, name)


class StandInType(type):
    """The class of stand-ins for classes."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return Tester.now().request("call", cls, list(arguments), named)

    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        Tester.now().request("setattr", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        Tester.now().request("delattr", cls, name)

    def __iter__(cls) -> Any:
        return Tester.now().request("iter", cls)

    def __len__(cls) -> int:
        return int(Tester.now().request("len", cls))

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return Tester.now().request("getitem", cls, key)


class StandIn(metaclass=StandInType):
    """The base of stand-ins for objects."""

    _rollmill = -1

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # Python's own: the traceback of an exception
            object.__setattr__(self, name, value)
        else:
            Tester.now().request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        Tester.now().request("delattr", self, name)

    def __copy__(self) -> Any:
        return Tester.now().request("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return Tester.now().request("deepcopy", self)


def _call(self: Any, *arguments: Any, **named: Any) -> Any:
    return Tester.now().request("call", self, list(arguments), named)


def _await(self: Any) -> Any:
    return Tester.now().request("await", self)
    yield


async def _coroutine(stand_in: Any) -> Any:
    return await stand_in


class StandInModule(types.ModuleType):
    """A module of the submission. What it holds is asked for each time."""

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):  # Python's own
            super().__setattr__(name, value)
        elif not isinstance(value, types.ModuleType) or isinstance(value, StandInModule):
            Tester.now().request("setattr", self, name, value)
        else:  # a package of the submission holds tests, which are here
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        Tester.now().request("delattr", self, name)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        names = [name for name in Tester.now().request("names", self) if not name.startswith("__")]
        return {**_real_dict(self), **{name: getattr(self, name) for name in names}}


class Tester(Link):
    _now: Tester | None = None

    def __init__(self, port: int, work: str, hidden: list[str]) -> None:
        super().__init__(connect(port))
        self._port, self._work, self._hidden = port, os.path.realpath(work), frozenset(hidden)
        self.trusting = False
        self._stand_ins: dict[int, Any] = {}
        self._classes: dict[int, Any] = {}
        self._found: dict[str, bool] = {}
        self._told: dict[str, str] = {}
        Tester._now = self

    @staticmethod
    def now() -> Tester:
        if Tester._now is None or Tester._now.broken:
            raise LinkLost("the process of the submission has ended")
        return Tester._now

    # objects of the submission

    def foreign(self, number: int, facts: Any) -> Any:
        if number not in self._stand_ins or facts["kind"] == "coroutine":
            self._stand_ins[number] = self._make(number, facts)
        made = self._stand_ins[number]
        return _coroutine(made) if facts["kind"] == "coroutine" else made

    def _make(self, number: int, facts: Any) -> Any:
        if facts["kind"] == "module":
            module = StandInModule(str(facts["name"]))
            _real_dict(module)["_rollmill"] = number
            return module
        kind = self._class(facts["class"])
        if facts["kind"] == "class":
            return kind
        plain = self.decode(facts["plain"]) if "plain" in facts else None
        base = type(plain)
        if plain is None or not issubclass(kind, base):
            made: Any = kind.__new__(kind) if issubclass(kind, BaseException) else object.__new__(kind)
        elif base in (list, dict, set):
            made = base.__new__(kind)
            (made.extend if base is list else made.update)(plain)
        else:
            made = base.__new__(kind, plain)
        made.__dict__["_rollmill"] = number
        return made

    def _class(self, facts: Any) -> Any:
        number = facts["number"]
        if number not in self._classes:
            bases = tuple(self._base(*base) for base in facts["bases"])
            if not any(isinstance(base, StandInType) for base in bases):
                bases = (StandIn, *bases)
            try:
                made = self._build(facts, bases)
            except TypeError:  # bases that do not go together
                made = self._build(facts, (StandIn,))
            self._classes[number] = made
        return self._classes[number]

    def _build(self, facts: Any, bases: tuple[Any, ...]) -> Any:
        plain = any(issubclass(base, (int, float, str, bytes, list, tuple, dict, set, frozenset)) for base in bases)
        special = frozenset(map(str, facts["special"]))
        body: dict[str, Any] = {"_rollmill": facts["number"], "__module__": str(facts["module"])}
        forwarded = _SHOWN if plain else _FORWARDED
        body.update((name, _forward(operation)) for name, operation in forwarded.items() if name in special)
        if not plain and "__eq__" in special:
            body.update(__eq__=_compare("eq"), __hash__=_forward("hash"))
        if not plain:
            body.update((name, _compare(each)) for name, each in _COMPARED.items() if name in special)
        if "__call__" in special:
            body["__call__"] = _call
        if "__await__" in special:
            body["__await__"] = _await
        if self.trusting and "__contains__" in special and not plain:
            body["__contains__"] = _forward("contains")
        return type.__call__(StandInType, str(facts["name"]), bases, body)

    def _base(self, module: str, name: str, facts: Any) -> Any:
        return _library_class(module, name) or self._class(facts)

    def home(self, value: Any) -> Any:
        if isinstance(value, StandInModule):
            return _real_dict(value)["_rollmill"]
        if isinstance(value, StandInType):
            return None if value is StandIn else type.__getattribute__(value, "_rollmill")
        return value.__dict__.get("_rollmill") if isinstance(type(value), StandInType) else None

    def reference(self, value: Any) -> Any:
        """What is a part of the standard library or a package is named: the worker has its own."""
        if self.home(value) is None:
            module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            if type(module) is str and type(name) is str and not self.is_of_test(module):
                found = getattr(sys.modules.get(module), name, None)
                return ["global", module, name] if found is value else super().reference(value)
        return super().reference(value)

    def is_of_test(self, module: str) -> bool:
        found = sys.modules.get(module)
        place = getattr(found, "__file__", None) or ""
        return found is None or module == "__main__" or os.path.realpath(place).startswith(self._work + "/")

    def decode(self, coded: Any, mutable: Any = None) -> Any:
        if isinstance(coded, list) and coded and coded[0] == "global":
            return _library_class(coded[1], coded[2])
        return super().decode(coded, mutable)

    def own(self, value: Any) -> Any:
        return None

    # exceptions

    def raised(self, error: BaseException) -> Any:
        base = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
        arguments = () if isinstance(error, AssertionError) else tuple(error.args)
        return {"name": base.__name__, "arguments": self.encode(arguments), "object": self.reference(error)[1]}

    def raise_again(self, told: Any) -> BaseException:
        if "home" in told:
            known = self._objects[told["home"]]
            return known if isinstance(known, BaseException) else RuntimeError("no exception")
        facts = told["class"]
        kind = _library_class(facts["module"], facts["name"]) or self._class(facts)
        arguments = self.decode(told["arguments"])
        if not issubclass(kind, BaseException):
            return RuntimeError(str(told["text"]))
        try:
            error = kind.__new__(kind, *arguments)
        except Exception:
            error = kind.__new__(kind)
        object.__setattr__(error, "args", arguments)
        error.__dict__.update((str(name), self.decode(value)) for name, value in told["attributes"])
        if isinstance(kind, StandInType):
            error.__dict__["_rollmill"] = told["object"][1]
        return error

    # with each message

    def before(self) -> Any:
        variables = dict(os.environ)
        changed, self._told = variables != self._told, variables
        return variables if changed else None

    def after(self, told: Any) -> None:
        for text, stream in zip(told, (sys.stdout, sys.stderr)):  # noqa: B905  (Python 3.8)
            if text:
                stream.write(str(text))

    # what the worker may ask

    def serve(self, name: str, arguments: list[Any]) -> Any:
        target, *rest = arguments
        if name == "call":
            return target(*rest[0], **rest[1])
        kind = type(target)
        steps = kind in (types.GeneratorType, map, filter, zip, enumerate) or kind.__name__.endswith("_iterator")
        ours = self.is_of_test(kind.__module__) and not isinstance(target, (type, *_cases()))
        streams = isinstance(target, io.IOBase) and name in ("getattr", "iter", "next")
        mocked = kind.__module__ == "unittest.mock" and name != "setattr"
        if not (ours or streams or mocked or (steps and name in ("iter", "next"))):
            raise PermissionError("a submission may not look into this object of a test")
        if name in ("getattr", "setattr"):
            if str(rest[0]).startswith("_") or (mocked and str(rest[0]).startswith(_OF_MOCKS)):
                raise AttributeError(str(rest[0]))
            if name == "setattr":
                return setattr(target, *rest)
            found = getattr(target, *rest)
            if isinstance(found, types.ModuleType):
                raise PermissionError("a submission may not have this module of a test")
            return found
        return _SERVED[name](target, *rest)


def _cases() -> tuple[type, ...]:
    """What a test case is, if anything here knows of any."""
    return (sys.modules["unittest.case"].TestCase,) if "unittest.case" in sys.modules else ()


_SERVED: dict[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (iter, next, len, bool, str)},
    "getitem": lambda target, key: target[key],
    "setitem": lambda target, key, value: target.__setitem__(key, value),
    "contains": lambda target, key: key in target,
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target, *of_error: type(target).__exit__(target, *of_error),
}


def _library_class(module: Any, name: Any) -> Any:
    """A class of built-in values, or an exception of a part of the standard library that is loaded. None for others."""
    if str(module).partition(".")[0] not in getattr(sys, "stdlib_module_names", ("builtins",)):
        return None
    found = getattr(sys.modules.get(module), str(name), None)
    if not isinstance(found, type):
        return None
    plain = module == "builtins" and found is not object and found is not type
    return found if plain or issubclass(found, Exception) else None


class Finder:
    """Finds the modules of tests here and those of the submission in the worker. What is imported already stays."""

    def __init__(self, tester: Tester, once_loaded: dict[str, Callable[[], None]]) -> None:
        """`once_loaded`: what is to be done with a module of the library, when a test is the first to import it."""
        self._tester = tester
        self._once_loaded = once_loaded

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        tester = self._tester
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None:
            place = found.origin or next(iter(found.submodule_search_locations or ()), "")
            real = os.path.realpath(place)
            if not real.startswith(tester._work + "/"):
                return self._of_library(name, found)
            if self._is_test(os.path.relpath(real, tester._work), found.origin is None):
                return found
        elif not isinstance(sys.modules.get(name.rpartition(".")[0]), StandInModule) and not self._asked(name):
            return None
        loader: Any = self
        spec = importlib.machinery.ModuleSpec(name, loader)
        if found is None or found.submodule_search_locations is not None:
            spec.submodule_search_locations = list(found.submodule_search_locations or ()) if found else []
        return spec

    def _of_library(self, name: str, spec: Any) -> Any:
        then = self._once_loaded.pop(name, None)
        if then is None:
            return None
        load = spec.loader.exec_module

        def load_and_then(module: Any) -> None:
            load(module)
            then()

        spec.loader.exec_module = load_and_then
        return spec

    def _asked(self, name: str) -> bool:
        """Whether the submission has a module that is not here. Only what a test imports is asked for."""
        frame: Any = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if "." in name or frame is None or not self._tester.is_of_test(frame.f_globals.get("__name__", "")):
            return False
        if name not in self._tester._found:
            self._tester._found[name] = self._tester.request("find", name) is True
        return self._tester._found[name]

    def _is_test(self, path: str, folder: bool) -> bool:
        if folder:
            return any(each.startswith(path + "/") for each in self._tester._hidden)
        file = os.path.basename(path)
        named = file == "conftest.py" or file.startswith("test_") or file.endswith("_test.py")
        return named or path in self._tester._hidden or bool(_TEST_FOLDERS & set(path.split("/")[:-1]))

    def create_module(self, spec: Any) -> Any:
        return self._tester.request("import", spec.name)

    def exec_module(self, module: Any) -> None:
        pass
