"""What a machine shows of itself, compared with an ordinary computer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.errors import MachineError
from rollmill.machines import fidelity, fidelity_probe
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import ExecResult
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_items_that_programs_look_at_first_are_those_of_a_computer(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    looked = await fidelity.look(machine)
    found = fidelity.compare(looked, fidelity.ordinary(looked))
    same = {item for item, (distance, _) in found.items.items() if distance == 0}
    assert same >= {"home", "shell history", "locale"}
    if Path("/sbin/init").exists():  # machines have the programs of this host
        assert "init" in same
    assert 0 < found.distance <= 0.3
    shell = await machine.exec(["bash", "-lc", "ps -p 1 -o comm=; whoami; echo ~; head -1 ~/.bash_history; hostname"])
    assert shell.output == b"systemd\nuser\n/home/user\nls -la\ndevbox\n", shell
    await machine.close()


async def test_an_ordinary_computer_has_facts_of_the_probe_only() -> None:
    looked = fidelity_probe.look()
    assert fidelity.NOT_TRUE.keys() <= {fact for facts in looked.values() for fact in facts}
    assert all(found.keys() == looked[item].keys() for item, found in fidelity.ordinary(looked).items())
    assert fidelity.compare(looked, looked).distance == 0.0
    changed = {**looked, "home": dict.fromkeys(looked["home"], "other")}
    [difference, *_] = fidelity.compare(changed, looked).items["home"][1]
    assert "other" in str(difference)


@pytest.mark.parametrize("output", [b"", b"[]", b'{"home": {"x": [1]}}', b"not JSON"])
async def test_an_answer_that_is_no_answer_is_refused(machine: NamespaceMachine, output: bytes) -> None:
    """A stand-in for `exec`: a real machine answers with facts."""

    async def exec(*_: object, **__: object) -> ExecResult:
        return ExecResult(0, output)

    machine.exec = exec  # type: ignore[method-assign]
    with pytest.raises(MachineError, match="the probe of fidelity failed"):
        await fidelity.look(machine)
