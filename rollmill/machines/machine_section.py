"""The section of a run that says what its machines are, with the kinds that are built in."""

from __future__ import annotations

from typing import ClassVar

from rollmill.kinds import KindSection, Slot
from rollmill.machines.machine import MachineHost


class MachineSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "machine",
        MachineHost,
        {
            "namespace": "rollmill.machines.namespace.client:NamespaceHost",
            "qemu": "rollmill.machines.qemu.host:QemuHost",
            "remote": "rollmill.machines.remote.client:RemoteHost",
            "e2b": "rollmill.machines.remote.e2b_client:E2BHost",
        },
        "rollmill.machines",
        default="namespace",
        removed={"firecracker": 'use kind = "qemu", which uses KVM where the host has it'},
    )
