"""The last line of every benchmark: one JSON object with the host, the figures and the bars."""

from __future__ import annotations

import json
import os
import platform
from typing import Any


def at_least(value: float, bar: float) -> dict[str, Any]:
    return {"value": value, "at_least": bar, "holds": value >= bar}


def at_most(value: float, bar: float) -> dict[str, Any]:
    return {"value": value, "at_most": bar, "holds": value <= bar}


def finish(benchmark: str, figures: dict[str, float], bars: dict[str, dict[str, Any]]) -> None:
    """Print the last line. Exit code 0 means that the benchmark ran, not that its bars hold."""
    host = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"benchmark": benchmark, "host": host, "figures": figures, "bars": bars}))
