"""Records how long real machines take to start: writes benchmarks/machine_starts.json.

    python -m benchmarks.record_machine_starts [--starts 200]

Seconds from the request to the end of the first command, `true`, with 1, 2, 4 and 8 machines started at once; and of
the first machine of a host, for which a process is started or a template is booted. `rollmill simulate burst` draws its
times from this file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import machines_qemu
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import MachineHost
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.machines.qemu.host import QemuHost

FILE = Path(__file__).with_name("machine_starts.json")
AT_ONCE = (1, 2, 4, 8)


async def start(host: MachineHost) -> float:
    began = time.monotonic()
    machine = await host.create(BUILT_IN)
    result = await machine.exec(["true"], timeout_s=60.0)
    seconds = time.monotonic() - began
    await machine.close()
    assert result.exit_code == 0, result
    return round(seconds, 5)


async def measure(make: Callable[[], MachineHost], starts: int, firsts: int) -> dict[str, object]:
    first_s, start_s = [], {}
    for _ in range(firsts):
        host = make()
        first_s.append(await start(host))
        await host.close()
    host = make()
    await start(host)
    for count in AT_ONCE:
        times: list[float] = []

        async def worker(times: list[float] = times, count: int = count) -> None:
            for _ in range(starts // count):
                times.append(await start(host))

        await asyncio.gather(*(worker() for _ in range(count)))
        start_s[count] = sorted(times)
    await host.close()
    return {"cores": os.cpu_count(), "first_s": first_s, "start_s": start_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=200, help="at each number at once; a tenth of it with QEMU")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    kinds = {"namespace": asyncio.run(measure(NamespaceHost, arguments.starts, 5))}
    if not machines_qemu.missing():
        kinds["qemu"] = asyncio.run(measure(QemuHost, max(arguments.starts // 10, 8), 2))
    recorded = {
        "what": "seconds from the request for a machine to the end of its first command",
        "host": {"machine": platform.machine(), "cores": os.cpu_count(), "load_before": round(load, 1)},
        "kinds": kinds,
    }
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"wrote {FILE.name}")


if __name__ == "__main__":
    main()
