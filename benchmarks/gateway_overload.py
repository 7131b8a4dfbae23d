"""The gateway at overload: those that are served keep their latency, the rest are told with 429.

    python -m benchmarks.gateway_overload [--quick]

The stub engine streams an answer in 100 ms and the gateway gives it 4 places, so 40 requests per second can be served.
8 requests may wait. First half of that rate is asked for, then four times as much. An answer may take 100 ms and the
time until a full queue has moved on, 200 ms; the bar allows half as much again for the cores that all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gateway import CONSOLE, Figures, free_port, port_of, process, up, write_texts
from benchmarks.gateway_load import percentiles
from benchmarks.gateway_streams import Stream, Totals, request_bytes
from benchmarks.output import at_least, at_most, finish

PLACES, QUEUE = 4, 8
TOKENS, PAUSE_MS = 10, 10
CAPACITY = PLACES * 1000 / (TOKENS * PAUSE_MS)  # requests per second
BOUND_MS = TOKENS * PAUSE_MS + QUEUE * 1000 / CAPACITY


async def ask_at(rate: float, port: int, seconds: float) -> tuple[list[float], Counter[str]]:
    """The seconds of the requests that were served, and what the others were told."""
    served: list[float] = []
    totals, loop = Totals(), asyncio.get_running_loop()

    async def one(number: int) -> None:
        request = request_bytes(f"{rate} {number}", TOKENS, PAUSE_MS)
        started = time.perf_counter()
        _, stream = await loop.create_connection(lambda: Stream(request, totals), "127.0.0.1", port)
        if await stream.done is None:
            served.append(time.perf_counter() - started)

    async with asyncio.TaskGroup() as group:
        started = time.perf_counter()
        for index in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, started + index / rate - time.perf_counter()))
            group.create_task(one(index))
    return served, totals.faults


async def measure(seconds: float, directory: Path) -> tuple[Figures, dict[str, Any]]:
    write_texts(directory)
    stub, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    module = [sys.executable, "-m"]
    with process(*module, "benchmarks.gateway_stub", port_of(stub), directory / "answer.json"):
        await up(stub, "/health")
        with process(*module, "benchmarks.gateway_served", port_of(url), stub, directory, 1, PLACES, QUEUE):
            await up(url, "/health")
            await ask_at(CAPACITY / 2, int(port_of(url)), 1.0)  # warm up
            half, told = await ask_at(CAPACITY / 2, int(port_of(url)), seconds)
            over, refused = await ask_at(CAPACITY * 4, int(port_of(url)), seconds)
    busy = sum(count for line, count in refused.items() if " 429 " in line)
    figures = {
        "half_served": float(len(half)),
        "half_failed": float(told.total()),
        **{f"half_{name}_ms": value for name, value in percentiles(half).items()},
        "overload_served": float(len(over)),
        "overload_told_429": float(busy),
        "overload_failed": float(refused.total() - busy),
        "overload_served_per_s": len(over) / seconds,
        **{f"overload_{name}_ms": value for name, value in percentiles(over).items()},
    }
    bars = {
        "overload_p99_ms": at_most(figures["overload_p99_ms"], 1.5 * BOUND_MS),
        "overload_failed": at_most(figures["overload_failed"], 0),
        "half_failed": at_most(figures["half_failed"], 0),
        "overload_served_per_s": at_least(figures["overload_served_per_s"], 0.8 * CAPACITY),
    }
    return figures, bars


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5 seconds per rate instead of 20")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gateway-overload-") as directory:
        figures, bars = asyncio.run(measure(5.0 if arguments.quick else 20.0, Path(directory)))
    for name, value in figures.items():
        CONSOLE.print(f"{name:24} {value:10.1f}")
    finish("gateway_overload", figures, bars)


if __name__ == "__main__":
    main()
