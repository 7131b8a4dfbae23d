"""A section of a run that names its own class: `kind = "…"`.

A kind is one of these:

    "jsonl"                    built in: the section's slot says which class
    "acme"                     an entry point of an installed package, in the group `rollmill.tasks` (or harnesses, …)
    "acme.tickets:Tickets"     a class in a module: of an installed package, or beside the configuration file

The class is loaded and checked against the section's base class or Protocol when the configuration is read, before
anything starts.
Its settings are the rest of the section. They are validated by the class of its constructor's only parameter:

    class Tickets:
        def __init__(self, config: TicketsConfig) -> None: ...     # TicketsConfig is a rollmill.Config
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import sys
import types
import typing
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, GetCoreSchemaHandler, ValidationError, create_model
from pydantic_core import core_schema

from rollmill.config import Config, LocalPath, explain_problems
from rollmill.errors import ConfigError, RollmillError


@dataclass(frozen=True)
class Slot:
    """What can stand in a section with a kind."""

    section: str  # its name in the TOML
    protocol: type | str  # or its name, "module:Class", if it is defined in a higher layer
    built_in: Mapping[str, str]  # kind → "module:Class"
    group: str  # of entry points
    default: str | None = None  # the kind of a section that names none
    removed: Mapping[str, str] = field(default_factory=dict)  # kinds of earlier releases → the remedy

    def loaded_protocol(self) -> type:
        found: type = load_object(self.section, self.protocol) if isinstance(self.protocol, str) else self.protocol
        return found


class KindSection(Config):
    """Base of the sections with a kind: one subclass per slot, and below it one that is made for each kind.

    Class members start with an underscore, so that settings may have any name.
    """

    _slot: ClassVar[Slot]

    kind: str = Field(description="Which class: a built-in name, `package.module:Class`, or an entry point.")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        if "_slot" not in cls.__dict__:  # made for one kind
            return handler(source)
        dump = core_schema.plain_serializer_function_ser_schema(lambda section: section.model_dump(mode="json"))
        return core_schema.no_info_plain_validator_function(cls._read, serialization=dump)

    @classmethod
    def choices(cls) -> list[type[Config]]:
        """For the reference: one section per kind that is built in."""
        return [_section_of(cls, kind) for kind in cls._slot.built_in] if "_slot" in cls.__dict__ else [cls]

    @classmethod
    def _read(cls, value: Any) -> KindSection:
        """The validated section of a table. ConfigError if its class cannot be used or a setting is wrong."""
        if isinstance(value, cls):
            return value
        slot = cls._slot
        if not isinstance(value, dict):
            raise ConfigError(f"{slot.section} must be a table, got {value!r}", hint=f"for example [{slot.section}]")
        kind = value.get("kind", slot.default)
        if not isinstance(kind, str):
            raise ConfigError(f"[{slot.section}] needs a kind", hint=f"built in: {', '.join(slot.built_in)}")
        section = _section_of(cls, kind)
        try:
            return section.model_validate_json(json.dumps({**value, "kind": kind}))
        except ValidationError as error:
            message = f'[{slot.section}] kind = "{kind}": {explain_problems(section, error)}'
            raise ConfigError(message, hint=cls._of_another_kind(error)) from None

    @classmethod
    def _of_another_kind(cls, error: ValidationError) -> str | None:
        """Says which other kinds have a setting that this one does not have."""
        for problem in error.errors():
            if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
                [name] = problem["loc"]
                kinds = [kind for kind in cls._slot.built_in if name in _section_of(cls, kind).model_fields]
                if kinds:
                    return f"{name!r} is a setting of kind = {' and '.join(map(repr, kinds))}"
        return None


@functools.cache
def _section_of(base: type[KindSection], kind: str) -> type[KindSection]:
    """The section of one kind: the settings of the kind's class, and what every kind of this slot has."""
    settings = _settings_of(base._slot, kind, load_class(base._slot, kind))
    taken = sorted(base.model_fields.keys() & (settings.model_fields.keys() if settings else ()))
    if taken:
        raise ConfigError(
            f'[{base._slot.section}] kind = "{kind}": its setting {taken[0]!r} has a name that every kind has already',
            hint="rename it",
        )
    bases: Any = (base,) if settings is None else (settings, base)  # lists what every kind has first
    tag: Any = (Literal[kind], Field(kind, description=base.model_fields["kind"].description))
    module = (settings or base).__module__
    return create_model(f"{base.__name__}[{kind}]", __base__=bases, __module__=module, kind=tag)


def build(section: KindSection) -> Any:
    """The object that a section describes: its class, constructed with its settings."""
    made = load_class(section._slot, section.kind)
    arguments = [] if _settings_of(section._slot, section.kind, made) is None else [section]
    try:
        return made(*arguments)
    except RollmillError:
        raise
    except Exception as error:  # code of the user
        where = f'[{section._slot.section}] kind = "{section.kind}"'
        raise ConfigError(f"{where}: {made.__name__} raised {type(error).__name__}: {error}") from error


def resolve_paths(base: type[KindSection], table: Any, directory: Path) -> Any:
    """A section's table in which every LocalPath is absolute: a relative one starts in `directory`."""
    kind = table.get("kind", base._slot.default) if isinstance(table, dict) else None
    if not isinstance(kind, str):
        return table
    try:
        fields = _section_of(base, kind).model_fields
    except ConfigError:
        return table  # the validation that follows raises it
    found = {
        name: _absolute(fields[name].annotation, value, directory) for name, value in table.items() if name in fields
    }
    return {**table, **found}


def _absolute(annotation: Any, value: Any, directory: Path) -> Any:
    """A setting's value with absolute paths, also those of the sections in it."""
    members = (annotation, *typing.get_args(annotation))
    if isinstance(value, str):
        here = value and LocalPath in members and "://" not in value
        return str(directory.absolute() / Path(value).expanduser()) if here else value
    for section in members:
        if isinstance(section, type) and issubclass(section, KindSection):
            if isinstance(value, list):
                return [resolve_paths(section, each, directory) for each in value]
            return resolve_paths(section, value, directory)
    return value


def search_also(directory: Path) -> None:
    """Find modules in this directory too, after the installed ones. A package's modules have its name before theirs."""
    path = str(directory.absolute())
    if path not in sys.path and not (directory / "__init__.py").exists():
        sys.path.append(path)


def load_class(slot: Slot, kind: str) -> type:
    target = slot.built_in.get(kind) or _entry_point(slot, kind) or kind
    module, separator, name = target.partition(":")
    if not separator:
        if kind in slot.removed:
            raise ConfigError(f"[{slot.section}] kind = {kind!r} was removed", hint=slot.removed[kind])
        near = difflib.get_close_matches(kind, slot.built_in, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"built in: {', '.join(slot.built_in) or 'none'}."
        raise ConfigError(
            f"[{slot.section}] kind = {kind!r} is unknown",
            hint=f"{hint} A class of your own is written as package.module:Class",
        )
    where = f'[{slot.section}] kind = "{kind}"'
    found = _import(where, module, name)
    if not isinstance(found, type):
        raise ConfigError(f"{where}: {name} is not a class", hint="a kind names a class, which Rollmill constructs")
    protocol = slot.loaded_protocol()
    problems = missing_members(found, protocol)
    if problems:
        raise ConfigError(
            f"{where}: {name} is no {protocol.__name__}: {'; '.join(problems)}",
            hint=f"docs/reference/python.md shows {protocol.__name__}",
        )
    return found


def _entry_point(slot: Slot, kind: str) -> str | None:
    found = importlib.metadata.entry_points(group=slot.group, name=kind)
    return next((point.value for point in found), None)


def load_object(where: str, target: str) -> Any:
    """What `package.module:name` names. ConfigError if it is not there."""
    module, separator, name = target.partition(":")
    if not separator:
        raise ConfigError(f"{where}: {target!r} is not of the form package.module:name")
    return _import(where, module, name)


def _import(where: str, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        hint = "install the package, or put the module beside the configuration file"
        raise ConfigError(f"{where}: there is no module {error.name!r}", hint=hint) from None
    except AttributeError:
        names = [each for each, value in vars(sys.modules[module]).items() if isinstance(value, type)]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its classes: {', '.join(names) or 'none'}"
        raise ConfigError(f"{where}: {module} has no {name}", hint=hint) from None
    except Exception as error:  # code of the user
        line = next((f" (line {trace.tb_lineno})" for trace in _traces(error) if trace.tb_next is None), "")
        raise ConfigError(f"{where}: importing {module} raised {type(error).__name__}: {error}{line}") from error


def _traces(error: BaseException) -> list[types.TracebackType]:
    traces, trace = [], error.__traceback__
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    return traces


def missing_members(found: type, protocol: type) -> list[str]:
    """What keeps a class from being the Protocol: members that are missing, or that cannot be called as it says.

    Of a base class whose methods have defaults, a class must be derived: there a misspelt method would never be called,
    so a public name that is nearly one of the base is a problem too.
    """
    if not getattr(protocol, "_is_protocol", False):
        if not issubclass(found, protocol):
            return [f"it is not derived from {protocol.__module__}.{protocol.__name__}"]
        return [*_misspelt(found, protocol), *_unlike(found, protocol)]
    return _unlike(found, protocol)


def _misspelt(found: type, base: type) -> list[str]:
    problems, known = [], members_of(base)
    for name in sorted(members_of(found) - known):
        if near := difflib.get_close_matches(name, known - vars(found).keys(), n=1, cutoff=0.8):
            problems.append(f"`{name}` is nearly `{near[0]}`, which it inherits: is that what is meant?")
    return problems


def _unlike(found: type, protocol: type) -> list[str]:
    problems = []
    own = found.__mro__ if getattr(protocol, "_is_protocol", False) else set(found.__mro__) - set(protocol.__mro__)
    annotated = {name for base in own for name in getattr(base, "__annotations__", {})}
    for name in sorted(members_of(protocol)):
        wanted, given = getattr(protocol, name, None), getattr(found, name, None)
        missing = not hasattr(found, name) and name not in annotated
        if missing or getattr(given, "__isabstractmethod__", False):
            problems.append(f"it has no `{name}`{_shape(name, wanted)}")
        elif inspect.iscoroutinefunction(wanted) and not inspect.iscoroutinefunction(given):
            problems.append(f"`{name}` must be `async def`")
        elif callable(wanted) and not callable(given):
            problems.append(f"`{name}` is not a method")
        elif callable(wanted) and not _accepts(given, wanted):
            problems.append(f"`{name}` does not take {inspect.signature(wanted)}")
    return problems


def members_of(protocol: type) -> set[str]:
    bases = [base for base in protocol.__mro__ if base not in (object, ABC, Protocol, typing.Generic)]
    names = {name for base in bases for name in (*vars(base), *getattr(base, "__annotations__", {}))}
    return {name for name in names if not name.startswith("_")}


def _shape(name: str, wanted: Any) -> str:
    return f": {name}{inspect.signature(wanted)}" if callable(wanted) else ""


def _accepts(given: Any, wanted: Any) -> bool:
    """Whether `given` can be called with the parameters of `wanted`."""
    positional: list[None] = []
    named: dict[str, None] = {}
    for parameter in inspect.signature(wanted).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            named[parameter.name] = None
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            positional.append(None)
    try:
        inspect.signature(given).bind(*positional, **named)
    except (TypeError, ValueError):
        return False
    return True


def _settings_of(slot: Slot, kind: str, found: type) -> type[Config] | None:
    """The Config class of the constructor's only parameter; None if it has no parameter."""
    if found.__init__ is object.__init__:  # type: ignore[misc]
        return None
    parameters = list(inspect.signature(found).parameters.values())
    if not parameters:
        return None
    where = f'[{slot.section}] kind = "{kind}": {found.__name__}.__init__'
    try:
        annotation = typing.get_type_hints(found.__init__).get(parameters[0].name)  # type: ignore[misc]
    except NameError as error:
        raise ConfigError(f"{where}: {error}", hint="its annotation must be a name of the module") from None
    members = [annotation, *typing.get_args(annotation)]
    settings = next((each for each in members if isinstance(each, type) and issubclass(each, Config)), None)
    needed = [each for each in parameters[1:] if each.default is inspect.Parameter.empty]
    if settings is None or needed:
        raise ConfigError(
            f"{where} must take one parameter that is annotated with a class derived from rollmill.Config",
            hint="def __init__(self, config: MyConfig) -> None",
        )
    return settings


def code_of(section: KindSection) -> dict[str, str | None]:
    """What code a section uses: class, version of its package, digest of the module's source."""
    found = load_class(section._slot, section.kind)
    module = sys.modules[found.__module__]
    source = Path(file).read_bytes() if (file := getattr(module, "__file__", None)) else b""
    name = f"{found.__module__}:{found.__qualname__}"
    return {
        "class": name,
        "version": _version_of(found.__module__.partition(".")[0]),
        "digest": hashlib.sha256(source).hexdigest(),
    }


@functools.cache
def _version_of(module: str) -> str | None:
    """The version of the installed package that has this module. None: it is in no package."""
    try:
        return importlib.metadata.version(module)  # most packages have the name of their module
    except importlib.metadata.PackageNotFoundError:
        packages = importlib.metadata.packages_distributions().get(module)  # reads the files of all packages
        return importlib.metadata.version(packages[0]) if packages else None
