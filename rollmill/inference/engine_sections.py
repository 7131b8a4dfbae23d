"""[[engines]]: the engines of a run, with the kinds that are built in."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollmill.config import NAME
from rollmill.inference.engine import EngineKind
from rollmill.kinds import KindSection, Slot

HOME = "home"


class EnginesSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "engines",
        EngineKind,
        {
            "embedded": "rollmill.inference.embedded.kind:Embedded",
            "vllm": "rollmill.inference.vllm.kind:Vllm",
        },
        "rollmill.engines",
        default="embedded",
    )

    region: str = Field(
        HOME,
        pattern=NAME,
        description="Region of these engines. The trainer is in the region of the first table; the others keep a copy "
        "of the weights.",
    )
    count: int = Field(1, ge=1, description="How many engines of this table there are.")
    gpus: int | None = Field(
        None,
        ge=0,
        description="GPUs that each engine has for itself; 0 is the CPU. Not set: one of those that are left over, "
        "shared if there are too few.",
    )
    form: Literal["bf16", "fp8", "nvfp4"] | None = Field(
        None,
        description="Number format that they serve. Not set: the run's `form`. Versions are published in every format "
        "that is served. Exact numerics hold for the run's own; tokens of the others are corrected by their importance "
        "ratio, and their mismatch is reported apart.",
    )
    labels: dict[str, str] = Field(
        {},
        description='Labels that their nodes must have, for `[cluster] kind = "ray"`: `{disk = "fast"}`. Beside those '
        "of `engine-REGION` in `[cluster] labels`; where both name a label, this one holds.",
    )

    @model_validator(mode="after")
    def _embedded_has_one_gpu(self) -> Self:
        if self.kind == "embedded" and (self.gpus or 0) > 1:
            raise ValueError(f"gpus is {self.gpus}, but an embedded engine computes on one: raise `count` instead")
        return self


@dataclass(frozen=True)
class EngineSpec:
    """One engine of the run. The first one of a region has the name of the region, the second `REGION-2` …"""

    name: str
    section: EnginesSection

    @property
    def role(self) -> str:
        return f"engine-{self.name}"

    @property
    def region(self) -> str:
        return self.section.region


def engine_specs(tables: Iterable[EnginesSection]) -> list[EngineSpec]:
    """Every engine, in the order of the tables."""
    found: list[EngineSpec] = []
    engines: collections.Counter[str] = collections.Counter()  # by region
    for table in tables:
        for _ in range(table.count):
            engines[table.region] += 1
            number = engines[table.region]
            found.append(EngineSpec(f"{table.region}-{number}" if number > 1 else table.region, table))
    return found
