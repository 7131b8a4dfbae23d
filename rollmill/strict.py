"""JSON from outside (object stores, other regions, files, model output) into strict pydantic models.

`StrictModel` refuses unknown fields, converts nothing and takes no number that is not finite. `parse_json` raises
ValueError with one short sentence for anything else: damaged JSON, NaN, 1e999, deep nesting, numbers of any length.
The caller turns it into the error of its own boundary.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, TypeVar, overload

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError

T = TypeVar("T")
M = TypeVar("M", bound="StrictModel")
_LARGEST_INTEGER = 1 << 63  # other readers of the same JSON may not go further


class StrictModel(BaseModel):
    """Base of everything that is read from outside: nothing unknown, nothing converted, nothing infinite."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _check_numbers(value: Any) -> Any:
    """ValueError for a number in free JSON that is not finite or out of range. The parser limits the depth."""
    if isinstance(value, dict):
        for inside in value.values():
            _check_numbers(inside)
    elif isinstance(value, list):
        for inside in value:
            _check_numbers(inside)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    elif isinstance(value, int) and not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise ValueError("a number is out of range")
    return value


FreeJson = Annotated[JsonValue, AfterValidator(_check_numbers)]  # any JSON, with numbers that can be written again


@overload
def parse_json(data: bytes | str, kind: type[M]) -> M: ...
@overload
def parse_json(data: bytes | str, kind: TypeAdapter[T]) -> T: ...
def parse_json(data: bytes | str, kind: Any) -> Any:
    """Validate untrusted JSON. ValueError says what is wrong with it, in one line."""
    try:
        if isinstance(kind, TypeAdapter):
            return kind.validate_json(data, strict=True)
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(describe_problem(error)) from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def describe_problem(error: ValidationError) -> str:
    """The first problem, and where in the JSON it is."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, problem["loc"]))[:200]
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def short(value: Any) -> str:
    """A JSON value in an error message: at most 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
