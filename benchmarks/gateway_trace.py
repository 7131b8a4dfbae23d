"""Where a request through the gateway spends its time, and what the slowest ones waited for.

    python -m benchmarks.gateway_trace [--stream] [--rate 200] [--seconds 10]

The same stub and load as `benchmarks.gateway`, at a fixed rate. The gateway's process notes a time at each stage of a
request. Printed are the stages of all requests, those of the slowest hundredth, and what else
ran in the gateway while these waited: collections of garbage, work in threads, turns of the event loop that took
long, the disk. `CPU` is that of the event loop's thread, which depends less on the load of the host. `turns` is how
many turns of the event loop a request takes, which does not depend on it. Tracing itself costs some tens of
microseconds per request.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web_protocol
from rich.table import Table

from benchmarks import gateway_served
from benchmarks.gateway import CONSOLE, free_port, load, port_of, process, up, write_texts
from benchmarks.gateway_load import percentile
from benchmarks.output import finish
from rollmill.gateway.access.account import current_account
from rollmill.gateway.model_routes import ModelRoutes
from rollmill.gateway.recording import recorder
from rollmill.gateway.routing import engine_http
from rollmill.gateway.sessions.sessions import Session
from rollmill.gateway.watching.observer import Observer
from rollmill.gateway.wire.dialects.openai_chat import OpenAIChat

STAGES = ("arrived", "handled", "parsed", "planned", "sent", "heard", "encoded", "recorded", "answered")
_LONG_TURN_S = 0.003
_now = time.perf_counter


class Trace:
    """The stages of all requests, and what ran beside them as (what, start, end)."""

    def __init__(self) -> None:
        self.requests: list[dict[str, float]] = []
        self.beside: list[tuple[str, float, float]] = []
        self.turns = 0
        self._collecting = 0.0

    def mark(self, stage: str) -> None:
        stages = getattr(current_account(), "stages", None)
        if stages is not None:
            stages[stage] = _now()
            stages[f"{stage} cpu"] = time.thread_time()

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            started = _now()
            try:
                return function(*arguments, **named)
            finally:
                self.beside.append((what, started, _now()))

        return run

    def install(self) -> None:
        """Replaces functions of the gateway by ones that note the time."""
        self._trace_server()
        self._after(OpenAIChat, "parse", "parsed")
        self._after(Session, "plan", "planned")
        self._after(engine_http._Connection, "begin", "sent")
        self._trace_engine()
        self._trace_disk()
        self._trace_loop()
        gc.callbacks.append(self._collection)

    def _after(self, owner: type, name: str, stage: str) -> None:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def traced(*arguments: Any, **named: Any) -> Any:
            result = plain(*arguments, **named)
            self.mark(stage)
            return result

        setattr(owner, name, traced)

    def _trace_server(self) -> None:
        received, answer, reported = web_protocol.RequestHandler.data_received, ModelRoutes._answer, Observer._report

        def data_received(handler: Any, data: bytes) -> None:
            if data:  # aiohttp calls it without any, too
                _ARRIVED[id(handler)] = {"arrived": _now(), "arrived cpu": time.thread_time()}, self.turns
            received(handler, data)

        async def traced(routes: Any, http: Any, dialect: Any) -> Any:
            arrived, turns = _ARRIVED[id(http.protocol)]
            account = current_account()
            account.stages = arrived  # type: ignore[attr-defined]
            self.mark("handled")
            try:
                return await answer(routes, http, dialect)
            finally:
                self.mark("answered")
                arrived["turns"] = self.turns - turns

        def report(observer: Any, request: Any, account: Any, *rest: Any) -> None:
            self.requests.append(getattr(account, "stages", {}))
            reported(observer, request, account, *rest)

        web_protocol.RequestHandler.data_received = data_received  # type: ignore[method-assign]
        ModelRoutes._answer = traced  # type: ignore[method-assign]
        Observer._report = report  # type: ignore[method-assign]

    def _trace_engine(self) -> None:
        send = engine_http.Exchange._send

        async def traced(exchange: Any, connection: Any) -> None:
            await send(exchange, connection)
            self.mark("heard")

        engine_http.Exchange._send = traced  # type: ignore[method-assign]

    def _trace_disk(self) -> None:
        append = recorder.Recorder.append

        async def traced(log: Any, *arguments: Any, **named: Any) -> None:
            self.mark("encoded")
            await append(log, *arguments, **named)
            self.mark("recorded")

        recorder.write_through = self.timed("disk", recorder.write_through)
        recorder.Recorder.append = traced  # type: ignore[method-assign]

    def _trace_loop(self) -> None:
        turn, to_thread = asyncio.BaseEventLoop._run_once, asyncio.to_thread  # type: ignore[attr-defined]

        def run_once(loop: Any) -> None:
            self.turns += 1
            select, slept = loop._selector.select, []

            def timed_select(timeout: Any = None) -> Any:
                events = select(timeout)
                slept.append(_now())
                return events

            loop._selector.select = timed_select
            turn(loop)
            loop._selector.select = select
            if _now() - slept[0] > _LONG_TURN_S:
                self.beside.append(("a long turn", slept[0], _now()))

        async def in_thread(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            name = getattr(work, "__qualname__", str(work))
            return await to_thread(self.timed(f"thread: {name}", work), *arguments, **named)

        asyncio.BaseEventLoop._run_once = run_once  # type: ignore[attr-defined]
        asyncio.to_thread = in_thread  # type: ignore[assignment]

    def _collection(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = _now()
        else:
            self.beside.append((f"garbage of generation {about['generation']}", self._collecting, _now()))


_ARRIVED: dict[int, tuple[dict[str, float], int]] = {}  # by connection: when data came, in which turn


def serve(port: str, stub: str, directory: str) -> None:
    trace = Trace()
    trace.install()
    try:
        gateway_served.gateway(int(port), stub, Path(directory), 1)
    finally:  # the server ends with SIGTERM
        whole = [stages for stages in trace.requests if len(stages) >= len(STAGES)]
        (Path(directory) / "trace.json").write_text(json.dumps({"requests": whole, "beside": trace.beside}))


async def run(arguments: argparse.Namespace, directory: Path) -> dict[str, float]:
    write_texts(directory)
    stub, url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    module = [sys.executable, "-m"]
    with process(*module, "benchmarks.gateway_stub", port_of(stub), directory / "answer.json"):
        await up(stub, "/health")
        with process(*module, "benchmarks.gateway_trace", "serve", port_of(url), stub, directory) as gateway:
            await up(url, "/health")
            timing = [port_of(url), port_of(stub), arguments.rate, arguments.seconds, arguments.stream]
            found = await load("latency", directory, *timing)
            gateway.terminate()
            gateway.wait(30)
    figures = {f"{path}_{name}_ms": found[path][name] for path in ("direct", "through") for name in ("p50", "p99")}
    return figures | report(json.loads((directory / "trace.json").read_text()))


def report(trace: dict[str, Any]) -> dict[str, float]:
    requests = [each for each in trace["requests"] if all(stage in each for stage in STAGES)]
    requests.sort(key=lambda each: each["answered"] - each["arrived"])
    slowest = requests[-max(1, len(requests) // 100) :]
    table = Table(title=f"{len(requests)} requests, milliseconds")
    for column in ("stage", "p50", "p90", "p99", "of the slowest 1 %", "CPU p50"):
        table.add_column(column)
    figures: dict[str, float] = {"turns": statistics.median(each["turns"] for each in requests)}
    for before, stage in itertools.pairwise(STAGES):
        took = [(each[stage] - each[before]) * 1000 for each in requests]
        slow = statistics.median((each[stage] - each[before]) * 1000 for each in slowest)
        shares = [percentile(took, share) for share in (0.5, 0.9, 0.99)]
        cpu = statistics.median((each[f"{stage} cpu"] - each[f"{before} cpu"]) * 1000 for each in requests)
        table.add_row(f"{before} → {stage}", *(f"{value:.3f}" for value in (*shares, slow, cpu)))
        figures |= {f"{stage}_p50_ms": shares[0], f"{stage}_cpu_ms": cpu}
    CONSOLE.print(table)
    beside: Counter[str] = Counter()
    for each in slowest:
        over = [(what, start, end) for what, start, end in trace["beside"] if start < each["answered"]]
        inside = {what for what, start, end in over if end > each["arrived"] and end - start > 0.001}
        beside.update(inside or {"nothing that took a millisecond"})
    for what, count in beside.most_common(12):
        CONSOLE.print(f"beside {count} of the {len(slowest)} slowest: {what}")
    return figures


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stream", action="store_true", help="streamed answers")
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gateway-") as directory:
        figures = asyncio.run(run(arguments, Path(directory)))
    finish("gateway_trace", {**figures, "load_before": before, "load_after": os.getloadavg()[0]}, {})


if __name__ == "__main__":
    main()
