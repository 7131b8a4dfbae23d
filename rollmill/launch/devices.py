"""Which GPUs of this host each role of a run gets.

The trainer gets the first ones, one per rank. Engines with `gpus` get the next ones for themselves. The other engines
share what is left; if nothing is left, they share all GPUs, as everything does on a host with one.

When a run is scaled, engines that run keep their GPUs. Only an engine that shares moves: when another one now gets its
GPU for itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.runs.run import RunConfig

VARIABLE = "CUDA_VISIBLE_DEVICES"


def present_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Imports no torch."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return [each for part in given.split(",") if (each := part.strip()) not in ("", "-1")]


def give_out(
    config: RunConfig, gpus: Sequence[str], *, trains: bool = True, held: Mapping[str, list[str]] | None = None
) -> dict[str, list[str]]:
    """Role → its GPUs. A role that is not listed gets none of its own: it sees them all.

    Raises ConfigError if there are too few. `trains`: whether a trainer runs too. `held`: the GPUs of engines that run.
    """
    ranks = max((stage.training.ranks for stage in config.stages), default=0) if trains else 0
    own = {spec.role: spec.section.gpus or 0 for spec in config.engine_specs}
    if config.device == "cpu" or (not gpus and not any(own.values())):
        return {}
    if ranks + sum(own.values()) > len(gpus) and (ranks > 1 or any(own.values())):
        needed = [f"{count} for {role}" for role, count in {"trainer": ranks, **own}.items() if count]
        raise ConfigError(
            f"the run needs {ranks + sum(own.values())} GPUs ({', '.join(needed)}), but this host has {len(gpus)}",
            hint="lower `ranks` of the stages (with --resume too: `ranks=N`), or `count` or `gpus` of [[engines]]; "
            "without `gpus` engines share",
        )
    held = held or {}
    given = {"trainer": list(gpus[:ranks])} if trains else {}
    given |= _own(own, gpus[ranks:], held)
    taken = {gpu for role in own if role in given for gpu in given[role]}
    shared = [gpu for gpu in gpus[ranks:] if gpu not in taken] or list(gpus)
    others = [spec.role for spec in config.engine_specs if spec.section.gpus is None]
    for number, role in enumerate(others):
        stays = role in held and not taken & set(held[role])
        given[role] = held[role] if stays else [shared[number % len(shared)]]
    return given


def _own(own: Mapping[str, int], gpus: Sequence[str], held: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The GPUs of engines that share with nobody. New ones get those first that no running engine uses."""
    counts = {role: count for role, count in own.items() if count}
    given = {role: held[role] for role, count in counts.items() if len(held.get(role, ())) == count}
    taken = {gpu for each in given.values() for gpu in each}
    used = {gpu for each in held.values() for gpu in each}
    left = sorted((gpu for gpu in gpus if gpu not in taken), key=lambda gpu: gpu in used)
    for role, count in counts.items():
        if role not in given:
            given[role], left = left[:count], left[count:]
    return given
