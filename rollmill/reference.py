"""The settings there are, read from the configuration classes; and a configuration written as commented TOML.

`rollmill config`, `--dry-run` and docs/reference/config.md all show what is found here.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rollmill.config import Config, sections_in
from rollmill.errors import ConfigError

_WIDTH = 100  # of comments
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """One key of a configuration file."""

    path: str  # dotted, as in `rollmill train RUN.toml training.optimizer.lr=1e-4`
    type: str
    default: str  # as TOML; "needed" if there is none, "not set" if the default is to leave it out
    description: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Section:
    """One table of a configuration file. A section that is chosen by a tag is listed once per choice."""

    path: str  # "" is the top level
    choice: str  # `type = "yarn"` if the tag chooses this section, else ""
    description: str
    settings: tuple[Setting, ...]
    same_as: str = ""  # another section with the same settings, which lists them
    header: str = ""  # of the table in a file: `[[stages]]` has the paths `stages.midtrain`, `stages.rl` …

    @property
    def title(self) -> str:
        name = self.header or "top level"
        return f"{name} with {self.choice}" if self.choice else name


def sections(model: type[Config]) -> list[Section]:
    """All sections of a configuration, the top level first."""
    found = list(_walk(model, "", "", model.__doc__ or ""))
    shortest: dict[tuple[type[Config], str], str] = {}
    for kind, section in sorted(found, key=lambda each: each[1].path.count(".")):
        shortest.setdefault((kind, section.choice), section.path)
    listed = []
    for kind, section in found:
        first = shortest[kind, section.choice]
        same_as = first if first != section.path else ""
        settings = () if same_as else tuple(_settings(kind, section.path))
        listed.append(replace(section, settings=settings, same_as=same_as))
    return listed


def setting_paths(model: type[Config]) -> set[str]:
    """Every dotted path of a setting or a section."""
    return {
        path
        for kind, section in _walk(model, "", "", "")
        # the list of `stages.rl` is `stages`
        for path in (section.path, section.header.strip("[]"), *(each.path for each in _settings(kind, section.path)))
    } - {""}


def _walk(
    model: type[Config], path: str, choice: str, description: str, header: str = ""
) -> Iterator[tuple[type[Config], Section]]:
    yield model, Section(path, choice, " ".join(description.split()), (), header=header)
    for name, field in model.model_fields.items():
        inner = sections_in(field.annotation)
        for kind in inner:
            below = f"{path}.{name}".lstrip(".") + _holder(field.annotation, kind)
            place = f"{header.strip('[]')}.{name}".lstrip(".")
            listed = get_origin(field.annotation) in (tuple, list)
            place = f"[[{place}]]" if listed else f"[{place}{_holder(field.annotation, kind)}]"
            tag = _tag(kind) if len(inner) > 1 else ""
            yield from _walk(kind, below, tag, field.description or "", place)


def _settings(model: type[Config], path: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        if not sections_in(field.annotation):
            below = f"{path}.{name}".lstrip(".")
            yield Setting(below, _field_type(field), _default(field), field.description or "")


def _holder(annotation: Any, kind: type[Config]) -> str:
    """Sections in a dict have a name that the user chooses; those in a list are named after their kind."""
    if get_origin(annotation) in (tuple, list) and "kind" in kind.model_fields:
        return f".{kind.model_fields['kind'].default}"
    return ".NAME" if get_origin(annotation) is dict else ""


def _tag(model: type[Config]) -> str:
    """`type = "yarn"`: what chooses this section out of several."""
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1:
            return f'{name} = "{get_args(field.annotation)[0]}"'
    return ""


def _field_type(field: FieldInfo) -> str:
    bounds = []
    for each in field.metadata:
        for sign, attribute in ((">", "gt"), ("≥", "ge"), ("<", "lt"), ("≤", "le")):
            bound = getattr(each, attribute, None)
            if bound is not None:
                bounds.append(f"{sign} {bound}")
    return " ".join([_type(field.annotation), " and ".join(bounds)]).strip()


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(to_toml_value(each) for each in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(_type(each) for each in arguments if each is not type(None))
    if origin in (tuple, list):
        several = f"{len(arguments)} × " if len(arguments) > 1 and arguments[-1] is not Ellipsis else ""
        return f"list of {several}{_type(arguments[0])}"
    if origin is not None and arguments:  # Annotated
        return _type(arguments[0])
    return _TYPES.get(annotation, "text")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "not set" if value is None else to_toml_value(value)


# --- finding


def find_sections(model: type[Config], path: str) -> list[Section]:
    """The section of that path with all below it, or the one setting of that path in its section."""
    listed = sections(model)
    below = [each for each in listed if f"{each.path}.".startswith(f"{path}.")]
    if below:
        return [_full(each, listed) for each in below]
    for each in (_full(each, listed) for each in listed):
        settings = tuple(setting for setting in each.settings if setting.path == path)
        if settings:
            return [replace(each, settings=settings)]
    paths = sorted(setting_paths(model), key=lambda known: (known.count("."), known))
    same_name = [known for known in paths if known.rpartition(".")[2] == path.rpartition(".")[2]]
    near = same_name[:3] or difflib.get_close_matches(path, paths, n=3, cutoff=0.5)
    names = ", ".join(each.path for each in listed if each.path and "." not in each.path)
    hint = f"did you mean {' or '.join(near)}?" if near else f"sections: {names}"
    raise ConfigError(f"no section or setting is called {path!r}", hint=hint)


def _full(section: Section, listed: list[Section]) -> Section:
    """The section with its settings, also if another one lists them."""
    if not section.same_as:
        return section
    first = next(each for each in listed if (each.path, each.choice) == (section.same_as, section.choice))
    moved = [
        Setting(section.path + each.path.removeprefix(first.path), each.type, each.default, each.description)
        for each in first.settings
    ]
    return replace(section, settings=tuple(moved), same_as="")


# --- TOML


def to_toml(config: Config) -> str:
    """The configuration as TOML that loads as the same configuration, each setting below its description."""
    return "\n".join(_table(config, "")).strip() + "\n"


def _table(config: Config, path: str) -> Iterator[str]:
    """A table's own values come first: what follows a header belongs to that header."""
    fields = type(config).model_fields
    inner: list[str] = []
    for name, field in fields.items():
        if name in config.left_out():
            continue
        value, below = getattr(config, name), f"{path}.{_key(name)}".lstrip(".")
        if isinstance(value, Config):
            inner += [*_header(f"[{below}]", field), *_table(value, below)]
        elif sections_in(field.annotation) and isinstance(value, Mapping):
            for key, each in value.items():
                inner += [*_header(f"[{below}.{_key(key)}]", field), *_table(each, f"{below}.{_key(key)}")]
        elif isinstance(value, tuple | list) and (sections_in(field.annotation) or _are_sections(value)):
            for each in value:
                inner += [*_header(f"[[{below}]]", field), *_table(each, below)]
        elif sections_in(field.annotation):
            inner += ["", *_comment(field.description), f"# [{below}] is not set"]
        else:
            yield ""
            yield from _comment(field.description)
            yield _line(name, value, field)
    yield from inner


def _are_sections(values: Sequence[Any]) -> bool:
    """Whether a list holds sections: a slot without built-in kinds has no sections to find in its annotation."""
    return bool(values) and all(isinstance(each, Config) for each in values)


def _header(header: str, field: FieldInfo) -> list[str]:
    return ["", "", *_comment(field.description), header]


def _line(name: str, value: Any, field: FieldInfo) -> str:
    if value is None:
        return f"# {_key(name)} is not set ({_field_type(field)})"
    text = to_toml_value(value)
    default = _default(field)
    changed = f"; default {default}" if default not in ("needed", text) else ""
    return f"{_key(name)} = {text}  # {_field_type(field)}{changed}"


def _comment(text: str | None) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text or "", _WIDTH - 2)]


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else to_toml_value(name)


def to_toml_value(value: Any) -> str:
    """One value as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {to_toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(to_toml_value(each) for each in value) + "]"
    # JSON's escapes are TOML's too; JSON leaves DEL alone, TOML does not
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
