"""The contract of virtual machines once more: their tests in an OCI image, with its own Python and shell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from rollmill.machines.qemu.host import QemuHost, QemuMachine
from tests.machines import test_qemu, test_terminals
from tests.machines.virtual import qemu_host  # noqa: F401

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
_MODULES = (test_qemu, test_terminals)
_OF_OTHERS = {
    "test_the_probe_passes_and_measures": "another image",
    "test_no_machine_outlives_a_dispatcher_that_is_killed": "another image",
    "test_a_qemu_that_cannot_be_handed_its_files_leaves_none_open": "another image",
    "test_who_is_called_root_has_no_rights": "root of an image has rights over its files",
    "test_no_string_of_the_hardware_names_an_emulator": "an image has the users and the home that it has",
    "test_python_is_used_interactively": "namespaces",
    "test_a_pager_shows_what_fits_on_the_screen_and_follows_its_size": "namespaces",
    "test_terminals_belong_to_the_user_and_a_flood_holds_nobody_up": "namespaces",
}
for _module in _MODULES:
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and _name not in _OF_OTHERS:
            globals()[_name] = _test


@pytest.fixture(scope="module", autouse=True)
def in_an_image(debian: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in _MODULES:
            patch.setattr(module, "BUILT_IN", debian)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machine(qemu_host: QemuHost, debian: str) -> AsyncIterator[QemuMachine]:  # noqa: F811
    machine = await qemu_host.create(debian, {"main.py": b"x = 1\n", "package/deep/module.py": b"\x00\xff" * 1000})
    yield machine
    await machine.close()
