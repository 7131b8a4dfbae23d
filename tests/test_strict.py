"""JSON from outside is validated, or refused with one short sentence. Nothing else can be raised."""

from __future__ import annotations

import pytest
from pydantic import Field, TypeAdapter

from rollmill.strict import FreeJson, StrictModel, parse_json


class Thing(StrictModel):
    count: int = 0
    seconds: float = 0.0
    places: tuple[int, ...] = ()
    free: dict[str, FreeJson] = Field(default_factory=dict)


def test_valid_json_is_read() -> None:
    data = b'{"count": 3, "seconds": 1, "places": [1, 2], "free": {"a": [1.5, null, {"b": "c"}]}}'
    thing = Thing(count=3, seconds=1.0, places=(1, 2), free={"a": [1.5, None, {"b": "c"}]})
    assert parse_json(data, Thing) == thing
    assert parse_json(b'{"a": 1}', TypeAdapter(dict[str, int])) == {"a": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"count": 3',
        b'{"unknown": 3}',
        b'{"count": true}',
        b'{"count": "3"}',
        b'{"count": 1e3}',
        b'{"count": ' + b"9" * 100_000 + b"}",
        b'{"seconds": 1e999}',
        b'{"seconds": -Infinity}',
        b'{"seconds": NaN}',
        b'{"seconds": ' + b"9" * 400 + b"}",
        b'{"free": {"a": 1e999}}',
        b'{"free": {"a": [{"b": NaN}]}}',
        b'{"free": {"a": ' + b"9" * 400 + b"}}",
        b'{"free": {"a": "\\ud800"}}',
        b'{"free": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b"[" * 1_000_000,
    ],
    ids=lambda data: repr(data[:40]),
)
def test_invalid_json_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ValueError) as caught:
        parse_json(data, Thing)
    assert type(caught.value) is ValueError
    assert 0 < len(str(caught.value)) < 500 and "\n" not in str(caught.value)
