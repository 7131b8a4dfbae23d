"""Which GPUs of this host each role of a run gets.

The trainer gets the first ones, one per rank. Engines with `gpus` get the next ones for themselves. The other engines
share what is left; if nothing is left, they share all GPUs, as everything does on a host with one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rollmill.cluster.run import RunConfig
from rollmill.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def present_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Imports no torch."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return [each for part in given.split(",") if (each := part.strip()) not in ("", "-1")]


def give_out(config: RunConfig, gpus: Sequence[str], *, trains: bool = True) -> dict[str, list[str]]:
    """Role → its GPUs. A role that is not listed gets none of its own: it sees them all.

    Raises ConfigError if there are too few. `trains`: whether a trainer runs too.
    """
    ranks = max((stage.training.ranks for stage in config.stages), default=0) if trains else 0
    own = {spec.role: spec.section.gpus or 0 for spec in config.engine_specs}
    if config.device == "cpu" or (not gpus and not any(own.values())):
        return {}
    if ranks + sum(own.values()) > len(gpus) and (ranks > 1 or any(own.values())):
        needed = [f"{count} for {role}" for role, count in {"trainer": ranks, **own}.items() if count]
        raise ConfigError(
            f"the run needs {ranks + sum(own.values())} GPUs ({', '.join(needed)}), but this host has {len(gpus)}",
            hint="lower `ranks` of the stages, or `count` or `gpus` of [[engines]]; without `gpus` engines share",
        )
    given = {"trainer": list(gpus[:ranks])} if trains else {}
    left = list(gpus[ranks:])
    for spec in config.engine_specs:
        if own[spec.role]:
            given[spec.role], left = left[: own[spec.role]], left[own[spec.role] :]
    shared = left or list(gpus)
    others = [spec for spec in config.engine_specs if spec.section.gpus is None]
    for number, spec in enumerate(others):
        given[spec.role] = [shared[number % len(shared)]]
    return given
