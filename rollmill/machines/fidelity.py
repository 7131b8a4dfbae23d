"""How tellable apart a machine and an ordinary computer are: the same probe in both, compared item by item.

An item's distance is the share of its facts that differ; the score of a machine is the mean over the items. 0: the
probe cannot tell them apart, 1: everything differs. Facts that only one of them has are not compared.

The ordinary computer is a Debian server, written down by hand: record one of your own with the probe (`rollmill
machines fidelity --print-probe`) on a computer like those that your users work on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rollmill.errors import ConfigError, MachineError
from rollmill.machines import fidelity_probe
from rollmill.machines.machine import Machine

Facts = dict[str, dict[str, bool | str]]
_FACTS = TypeAdapter(Facts)
_PROBE_S = 30.0
_MOST_BYTES = 1 << 16

# What an ordinary Debian server shows where it is not simply true.
NOT_TRUE: dict[str, bool | str] = {
    "pid 1": "systemd",
    "encoding of files": "utf-8",
    **dict.fromkeys(("processor is an emulator", "maker is an emulator", "own name is a number"), False),
    **dict.fromkeys(("mark of a container", "container variable", "control group of a container"), False),
    **dict.fromkeys(("filter of system calls", "system directories are mounts", "overlay root"), False),
}


@dataclass(frozen=True)
class Difference:
    fact: str
    machine: bool | str
    reference: bool | str

    def __str__(self) -> str:
        if isinstance(self.machine, bool):
            return f"{'' if self.machine else 'no '}{self.fact}"
        return f"{self.fact}: {self.machine or 'none'}, not {self.reference}"


@dataclass(frozen=True)
class Fidelity:
    items: Mapping[str, tuple[float, tuple[Difference, ...]]]  # item → distance, what differs

    @property
    def distance(self) -> float:
        return sum(distance for distance, _ in self.items.values()) / max(len(self.items), 1)


def ordinary(facts: Facts) -> Facts:
    """What an ordinary Debian server shows of these facts."""
    return {item: {fact: NOT_TRUE.get(fact, True) for fact in looked} for item, looked in facts.items()}


def compare(machine: Facts, reference: Facts) -> Fidelity:
    items = {}
    for item, expected in reference.items():
        common = [fact for fact in expected if fact in machine.get(item, {})]
        found = tuple(
            Difference(fact, machine[item][fact], expected[fact])
            for fact in common
            if machine[item][fact] != expected[fact]
        )
        if common:
            items[item] = (len(found) / len(common), found)
    return Fidelity(items)


def probe_source() -> str:
    """A program that prints the facts of the computer it runs on."""
    return Path(fidelity_probe.__file__).read_text()


async def look(machine: Machine) -> Facts:
    """Run the probe in a machine. Its answer is checked: programs of the image made it."""
    source = probe_source()
    limit = _PROBE_S * machine.capabilities.slowdown
    result = await machine.exec(["python", "-c", source], timeout_s=limit, max_output=_MOST_BYTES)
    try:
        if result.exit_code != 0:
            raise ValueError
        return _FACTS.validate_json(result.output)
    except ValueError:
        said = result.output[-300:].decode("utf-8", "replace")
        raise MachineError(f"the probe of fidelity failed in a machine: {said}") from None


def read_reference(path: Path) -> Facts:
    """The facts of a computer that the probe was run on. ConfigError: the file is something else."""
    try:
        return _FACTS.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{path} is not what the probe prints: {error}",
            hint=f"`rollmill machines fidelity --print-probe` is the probe; there: `python probe.py > {path.name}`",
        ) from None
