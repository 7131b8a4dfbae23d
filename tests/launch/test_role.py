"""The logs of roles: times before lines, and a word about what is done."""

from __future__ import annotations

import io
import re

from rollmill.launch.role import TimedStream
from rollmill.runs.exits import untimed

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def test_each_line_begins_with_the_time_and_loses_it_again() -> None:
    below = io.StringIO()
    stream = TimedStream(below)
    for part in ("one", " line\n", "two\nthr", "ee\n", "\n"):
        assert stream.write(part) == len(part)
    lines = below.getvalue().splitlines()
    assert all(re.match(STAMP, line) for line in lines)
    assert list(map(untimed, lines)) == ["one line", "two", "three", ""]
    assert untimed("no time here") == "no time here" and stream.getvalue() == below.getvalue()
