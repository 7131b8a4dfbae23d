"""TOML into a strict, validated tree.

Every component owns a `Config` subclass next to its code; `rollmill.cluster.run.RunConfig` composes them. Unknown keys
fail and name the nearest valid one; `key.path=value` overrides come from the command line and are parsed as TOML values.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rollmill.errors import ConfigError


class Config(BaseModel):
    """Base of every configuration section: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


C = TypeVar("C", bound=Config)


def load_config(model: type[C], path: Path | None, overrides: Sequence[str] = ()) -> C:
    """Read `path` (TOML), lay `overrides` over it, validate. Every problem is listed at once."""
    tree: dict[str, Any] = {}
    source = "the command line"
    if path is not None:
        source = str(path)
        try:
            tree = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist", hint="`ls examples/` shows configurations to start from") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(tree, override)
    return validate_config(model, tree, source)


def validate_config(model: type[C], tree: dict[str, Any], source: str) -> C:
    try:
        # JSON mode, so that TOML arrays may fill tuples and strings may fill enums while numbers stay strict
        return model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(model, error)}") from None
    except TypeError as error:
        raise ConfigError(f"{source}: {error}", hint="dates are not used in configurations; quote them") from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form key.path=value", hint="for example training.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    node = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    node[leaf] = value


def _explain(model: type[Config], error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {where!r}{_nearest(model, problem['loc'])}")
        else:
            given = "" if problem["type"] == "missing" else f" (got {problem['input']!r})"
            lines.append(f"{where}: {problem['msg']}{given}")
    return "; ".join(lines)


def _nearest(model: type[Config], location: tuple[Any, ...]) -> str:
    """The valid key nearest to a mistyped one: first among its siblings, then anywhere in the tree."""
    section: Any = model
    for part in location[:-1]:
        field = section.model_fields.get(part) if hasattr(section, "model_fields") else None
        section = _section_of(field.annotation) if field is not None else section
    siblings = list(getattr(section, "model_fields", {}))
    near = difflib.get_close_matches(str(location[-1]), siblings, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {'.'.join([*map(str, location[:-1]), near[0]])!r}?"
    paths = {path.rpartition(".")[2]: path for path in _paths(model)}
    near = difflib.get_close_matches(str(location[-1]), list(paths), n=1, cutoff=0.7)
    return f"; did you mean {paths[near[0]]!r}?" if near else f"; valid keys here: {', '.join(siblings)}"


def _section_of(annotation: Any) -> Any:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return annotation


def _paths(model: Any, prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        found.append(prefix + name)
        if isinstance(section, type) and issubclass(section, Config):
            found.extend(_paths(section, f"{prefix}{name}."))
    return found
