"""Machines of these tests: the fixtures of tests/machines."""

from tests.machines.conftest import (  # noqa: F401
    any_host,
    bare_host,
    host,
    image_with_pytest,
    machine,
    slow_commands,
)
