"""TOML into a strict, validated tree.

Every component owns a `Config` subclass next to its code; `rollmill.runs.configuration.settings.RunConfig` composes
them. An unknown key is an error that names the nearest valid key. Overrides (`key.path=value`) come from the command
line; their values are parsed as TOML.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

from rollmill.errors import ConfigError

NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"  # of runs, stages and regions: lines, directories and objects are named after them


class LocalPath(str):
    """A setting that is a path. A relative one is relative to the directory of the configuration file."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema(min_length=1))


class Config(BaseModel):
    """Base of every configuration section: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def derive(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Fill in values that follow from others. Called before the tree is validated."""
        return tree

    def left_out(self) -> Collection[str]:
        """Settings that are not written down: beside the others they mean nothing."""
        return ()

    @classmethod
    def choices(cls) -> list[type[Config]]:
        """The classes that a section of this class can be."""
        return [cls]


C = TypeVar("C", bound=Config)


def load_config(model: type[C], path: Path | None, overrides: Sequence[str] = ()) -> C:
    """Read `path` (TOML), apply `overrides`, validate. The error lists every problem at once."""
    tree: dict[str, Any] = {}
    source = "the command line"
    if path is not None:
        source = f"{path} with overrides" if overrides else str(path)
        try:
            tree = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist", hint="`ls examples/` shows configurations to start from"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="check its owner and mode") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is not valid TOML: {error}", hint="`rollmill init DIR` writes a file that works"
            ) from None
        if "modules" in model.model_fields:
            tree.setdefault("modules", str(path.parent.absolute()))
    return override_config(model, tree, overrides, source)


def override_config(model: type[C], tree: dict[str, Any], overrides: Sequence[str], source: str) -> C:
    """Apply `key.path=value` overrides to a tree, in place, and validate it."""
    for override in overrides:
        _apply_override(tree, override)
    return validate_config(model, tree, source)


def validate_config(model: type[C], tree: dict[str, Any], source: str) -> C:
    try:
        # JSON mode: arrays may fill tuples and strings may fill enums, while numbers stay strict
        return model.model_validate_json(json.dumps(model.derive(tree)))
    except ValidationError as error:
        of_a_run = "modules" in model.model_fields
        hint = "`rollmill config` explains every setting; `rollmill init DIR` writes a file that works"
        raise ConfigError(f"{source}: {explain_problems(model, error)}", hint=hint if of_a_run else None) from None
    except TypeError as error:  # dates: TOML has them, JSON has not
        raise ConfigError(f"{source}: {error}", hint="dates are not used in configurations; quote it") from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"override {override!r} is not of the form key.path=value",
            hint="for example stages.rl.training.optimizer.lr=1e-4",
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    node: Any = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {}) if isinstance(node, dict) else _item(node, parent, override)
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    if isinstance(node, list):
        raise ConfigError(f"override {override!r} names no setting of {leaf!r}", hint=f"for example {key}.SETTING=…")
    node[leaf] = value


def _item(tables: list[Any], name: str, override: str) -> Any:
    """The table of a list that is called `name`: by its `name`, else by its `kind`, else by its number from 0."""
    names = [item_name(table) for table in tables]
    if name in names:
        return tables[names.index(name)]
    if name.isdecimal() and int(name) < len(tables):
        return tables[int(name)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(names) or 'none'}"
    raise ConfigError(f"override {override!r}: nothing is called {name!r}", hint=hint)


def item_name(table: Any) -> str:
    """What a table of a list is called: its `name`, or its `kind`. The kind `acme.stages:Dpo` is called `dpo`."""
    if not isinstance(table, dict):
        return ""
    return str(table.get("name") or str(table.get("kind", "")).rpartition(":")[2].lower())


def explain_problems(model: type[Config], error: ValidationError) -> str:
    """Every problem of a tree that is not a `model`, in one line. An unknown key gets the nearest valid one."""
    lines = []
    problems = error.errors()
    inside = {problem["loc"][:1] for problem in problems if problem["loc"][1:]}
    for problem in problems:
        if problem["type"] == "too_short" and problem["loc"] in inside:
            continue  # its tables are wrong, which is said of each
        path, siblings = _locate(model, problem["loc"])
        where = ".".join(path) or "(top level)"
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # of a section that has a class of its own
            lines.append(f"{cause.message}; {cause.hint}" if cause.hint else cause.message)
        elif problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {where!r}{_nearest(model, path, siblings)}")
        else:
            given = "" if problem["type"] == "missing" else f" (got {_shorten(problem['input'])})"
            lines.append(f"{where}: {problem['msg']}{given}")
    return "; ".join(lines)


def _locate(model: type[Config], location: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """Returns the path in the TOML of a validation error, and the keys that are valid in that section."""
    sections: list[type[Config]] = [model]
    path: list[str] = []
    siblings: list[str] = []
    for part in map(str, location):
        siblings = list(dict.fromkeys(name for section in sections for name in section.model_fields))
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        # pydantic's path also has the tag or class of the union member it tried, which is not in the TOML
        member = [section for section in sections if not fields and part in (section.__name__, *_tags(section))]
        if fields:
            sections = [section for field in fields for section in sections_in(field.annotation)]
        elif member:
            sections = member
            continue
        path.append(part)
    return path, siblings


def _nearest(model: type[Config], path: list[str], siblings: list[str]) -> str:
    """The valid key nearest to a mistyped one, in its own section or anywhere in the tree."""
    *parents, key = path
    beside = [(_likeness(key, name), ".".join([*parents, name])) for name in siblings]
    # a key of another section must be clearly more alike than a key of this one
    elsewhere = [(_likeness(key, path.rpartition(".")[2]) - 0.2, path) for path in _paths(model)]
    candidates = sorted([*beside, *elsewhere], key=lambda candidate: candidate[1].count("."))  # of equals, the highest
    likeness, nearest = max(candidates, key=lambda candidate: candidate[0], default=(0.0, ""))
    return f"; did you mean {nearest!r}?" if likeness >= 0.5 else f"; valid keys here: {', '.join(siblings)}"


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


def sections_in(annotation: Any) -> list[type[Config]]:
    """The configuration sections that an annotation may hold: itself, members of a union, items of a collection."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation.choices()
    return [section for member in get_args(annotation) for section in sections_in(member)]


def _tags(section: type[Config]) -> list[str]:
    return [str(tag) for field in section.model_fields.values() for tag in get_args(field.annotation)]


def _paths(model: type[Config], prefix: str = "") -> list[str]:
    """Every key that a file may have, except inside collections whose keys users choose. What stands in a list is named
    after its kind."""
    found = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        holder = get_origin(field.annotation)
        for section in sections_in(field.annotation):
            if holder not in (dict, list, tuple):
                found.extend(_paths(section, f"{prefix}{name}."))
            elif "kind" in section.model_fields:
                found.extend(_paths(section, f"{prefix}{name}.{section.model_fields['kind'].default}."))
    return found


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
