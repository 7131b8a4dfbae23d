"""Checks and converts values so that SQLite, PostgreSQL and a payload can all store them and read them back.

Models, tasks, graders, users and clients produce these values. A value that cannot be stored raises TrajectoryError,
which ends one trajectory or one request. Without these checks the database would refuse the value, and that would look
like a store that is down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from rollmill.errors import TrajectoryError

LONGEST_TEXT = 20_000  # characters
LONGEST_JSON = 256 << 10  # characters of one JSON value
DEEPEST_JSON = 64  # the readers of payloads stop at 200
LONGEST_KEY = 256  # characters; PostgreSQL refuses index rows over 2704 bytes, and some indices hold two keys
LONGEST_OBJECT_KEY = 1000
_CONTAINERS = (dict, list, tuple)
LARGEST_NUMBER = 1e12  # training squares rewards and sums them up in float32


def to_text(value: str, limit: int = LONGEST_TEXT) -> str:
    """Text for people to read. Replaces what PostgreSQL refuses: NUL bytes and lone surrogates."""
    return str(value)[:limit].encode("utf-8", "replace").decode().replace("\0", "\N{SYMBOL FOR NULL}")


def is_key(value: object, limit: int = LONGEST_KEY) -> bool:
    """Whether a database can hold the value as an id or a name, exactly as it is."""
    return isinstance(value, str) and len(value) <= limit and to_text(value) == value


def to_key(what: str, value: str, limit: int = LONGEST_KEY) -> str:
    """An id or a name. It is stored unchanged or refused, because a changed one would name something else."""
    if not is_key(value, limit):
        raise TrajectoryError(
            f"{what} is {_short(value)}",
            hint=f"a string of at most {limit} characters, without NUL and lone surrogates",
        )
    return value


def to_number(what: str, value: object) -> float:
    """A finite float that is small enough for training to compute with."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST_NUMBER:
        raise TrajectoryError(
            f"{what} is {_short(value)}",
            hint=f"a finite number of at most {LARGEST_NUMBER:g}; a trajectory that cannot be graded fails",
        )
    return number


def to_numbers(what: str, value: Mapping[str, Any]) -> str:
    """JSON of an object of named numbers."""
    named = _as_dict(what, value)
    return to_json(what, {name: to_number(f"{what}[{_short(name)}]", number) for name, number in named.items()})


def to_object(what: str, value: Mapping[str, Any]) -> str:
    """JSON of an object of named values."""
    return to_json(what, _as_dict(what, value))


def to_json(what: str, value: object) -> str:
    """JSON in ASCII, so that it can hold NUL bytes and lone surrogates. NaN and infinity are refused at any depth."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _not_json(what, error) from None
    if len(text) > LONGEST_JSON:
        raise _not_json(what, f"{len(text)} characters, the limit is {LONGEST_JSON}")
    check_depth(what, value)
    return text


def check_depth(what: str, value: object) -> None:
    """Refuse JSON that is nested too deep for one of its readers. The value must not contain itself."""
    level: list[Any] = [value]
    for _ in range(DEEPEST_JSON - 1):
        level = [child for parent in level for child in _children(parent) if isinstance(child, _CONTAINERS)]
        if not level:
            return
    if any(level):  # a container with something in it
        raise _not_json(what, f"it is nested more than {DEEPEST_JSON} levels deep")


def from_json(text: str) -> Any:
    return json.loads(text)


def _as_dict(what: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _not_json(what, f"it is a {type(value).__name__}, not an object of named values")
    return dict(value)


def _children(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _not_json(what: str, why: object) -> TrajectoryError:
    return TrajectoryError(
        f"{what} cannot be stored as JSON: {str(why)[:200]}",
        hint="finite numbers, strings, lists and objects, bounded in size",
    )


def _short(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # a repr may raise anything; very large integers have none
        return f"a {type(value).__name__}"
