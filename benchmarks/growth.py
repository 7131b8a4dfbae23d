"""How costs grow with what there is: 10^3 to 10^6, and the slope of each law as a bar. `python -m benchmarks.growth`

A slope of 1 is linear, 0 constant, 2 quadratic: it is that of the straight line through the logarithms. Times are CPU
seconds of this process, the best of three; with `--database` what a client of PostgreSQL waits. tests/test_scale.py
holds the same laws by counting; this shows what they cost. `--only NAME` measures one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import growth_index
from benchmarks.growth_index import LAWS as INDEX
from benchmarks.growth_weights import LAWS as WEIGHTS
from benchmarks.output import at_most, finish


class Law(NamedTuple):
    name: str
    of: str  # what is counted along the axis
    unit: str
    sizes: Sequence[int]
    cost: Callable[[int], float]
    slope: float  # the bar


LAWS = [Law(*law) for law in (*INDEX, *WEIGHTS)]


def slope_of(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Of the least squares through the logarithms."""
    x, y = ([math.log(max(each, 1e-9)) for each in values] for values in (sizes, costs))
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - middle_x) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the largest size of each law: under a minute")
    parser.add_argument("--only", choices=[law.name for law in LAWS], help="measure this law only")
    parser.add_argument("--database", metavar="URL", help="measure the index on this PostgreSQL, and nothing else")
    arguments = parser.parse_args()
    growth_index.database = arguments.database
    figures, bars = dict[str, float](), {}
    for law in LAWS[: len(INDEX)] if arguments.database else LAWS:
        if arguments.only not in (None, law.name):
            continue
        sizes = law.sizes[:-1] if arguments.quick else law.sizes
        costs = [law.cost(size) for size in sizes]
        slope = slope_of(sizes, costs)
        shown = "  ".join(f"{size:,}: {cost:.3g} {law.unit}" for size, cost in zip(sizes, costs, strict=True))
        print(f"{law.name:22} slope {slope:5.2f} (at most {law.slope})   {law.of}: {shown}", flush=True)
        figures |= {f"{law.name}_{size}": cost for size, cost in zip(sizes, costs, strict=True)}
        bars[f"{law.name}_slope"] = at_most(round(slope, 3), law.slope)
    finish("growth", figures, bars)


if __name__ == "__main__":
    main()
