"""The contract of machines once more: tests of namespace machines in an OCI image, with its own Python and shell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines import (
    conftest,
    test_containment,
    test_egress,
    test_loopback,
    test_namespace,
    test_processes,
    test_terminals,
)
from tests.machines.test_egress import port  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")
_MODULES = (test_containment, test_egress, test_loopback, test_namespace, test_processes, test_terminals)
_OF_OTHERS = {
    "test_a_process_is_marked_before_the_next_command_begins": "no machine",
    "test_a_command_that_cannot_begin_says_why": "no machine",
    "test_images_are_directories_and_unknown_ones_are_named": "other images",
    "test_virtual_machines_and_their_forks_reach_the_same_names": "virtual machines",
    "test_python_is_used_interactively_in_a_virtual_machine": "virtual machines",
    "test_a_machine_host_that_dies_is_an_infrastructure_failure_and_is_replaced": "it ends the host of other machines",
    "test_a_machine_that_could_not_be_set_up_says_why": "it asks the host of other machines",
    "test_whoever_is_cancelled_leaves_no_complaint_of_asyncio_behind": "it asks the host of other machines",
    "test_a_warm_python_behaves_like_a_cold_one": "there is no warm Python: an image has its own",
}
for _module in _MODULES:
    for _name, _test in vars(_module).items():
        slow = any(mark.name == "slow" for mark in getattr(_test, "pytestmark", ()))
        if _name.startswith("test_") and _name not in _OF_OTHERS and not slow:
            globals()[_name] = _test


@pytest.fixture(scope="module", autouse=True)
def in_an_image(debian: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (*_MODULES, conftest):
            if hasattr(module, "BUILT_IN"):
                patch.setattr(module, "BUILT_IN", debian)
        yield


@pytest_asyncio.fixture(loop_scope="module")
async def machine(host: NamespaceHost, debian: str) -> AsyncIterator[NamespaceMachine]:
    machine = await host.create(debian)
    yield machine
    await machine.close()


@pytest.fixture
def any_host(host: NamespaceHost) -> NamespaceHost:
    return host


@pytest.fixture
def bare_host(host: NamespaceHost) -> NamespaceHost:
    """Without root a machine has one user: test_image_machines.py."""
    return host
