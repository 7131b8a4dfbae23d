"""Runs all tests once and notes which functions each of them calls. Its text runs in a machine, and it tells nothing
about verdicts.

A function is named by its file and the line on which its code begins.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any


class Tracer:
    """A plugin of pytest. `only`: the tests to run; None: they are only named."""

    def __init__(self, directory: str, only: list[str] | None) -> None:
        self._prefix, self._only = directory + "/", only
        self._called: set[tuple[str, int]] = set()
        self.by_test: dict[str, set[tuple[str, int]]] = {}

    def note(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self._prefix):
            self._called.add((code.co_filename[len(self._prefix) :], code.co_firstlineno))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._only is None:
            self.by_test = {_name(item): set() for item in items}
            return
        only = set(self._only)
        items[:] = [item for item in items if _name(item) in only]

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Iterator[None]:
        self._called = self.by_test.setdefault(_name(item), set())
        threading.settrace(self.note)
        sys.settrace(self.note)
        yield
        sys.settrace(None)
        threading.settrace(None)


def _name(item: Any) -> str:
    return str(item.nodeid.partition("[")[0])


def main() -> None:
    import pytest

    work = json.load(sys.stdin)
    os.chdir(work["directory"])
    sys.path[:0] = work["paths"]
    pytest.hookimpl(hookwrapper=True)(Tracer.pytest_runtest_protocol)
    tracer = Tracer(work["directory"], work["only"])
    options = ["-q", "--continue-on-collection-errors", "-p", "no:cacheprovider", "--rootdir=" + work["directory"]]
    options += ["--collect-only"] if work["only"] is None else []
    try:
        pytest.main(options, plugins=[tracer])
    except BaseException:
        traceback.print_exc()
    finally:
        with open(work["output"], "w") as file:
            json.dump({test: sorted(called) for test, called in tracer.by_test.items()}, file)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
