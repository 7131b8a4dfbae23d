"""Watches every request: histograms, one line in the access log, a trace. Never contents or secrets.

The access log is `access.jsonl` in the gateway's directory: one JSON object per request. A thread writes it, so that a
slow disk delays no answer. It gets the lines of a quarter of a second at once, because waking a thread costs more than
a line. At 64 MiB the file is renamed; three old files are kept.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import queue
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from rollmill.gateway.access.account import Account, open_account
from rollmill.gateway.watching.metrics import Metrics
from rollmill.gateway.watching.tracing import Tracer
from rollmill.gateway.wire.body import to_bytes

ACCESS_LOG = "access.jsonl"
_POLLED = ("/health", "/metrics")  # asked all the time, by programs
_FLUSH_S = 0.25
_MOST_BYTES, _OLD_FILES = 64 << 20, 3
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Observer:
    """`dialect_of` names the wire format of a path. Without a `directory` there is no access log."""

    def __init__(
        self, metrics: Metrics, dialect_of: Callable[[str], str], directory: Path | None, tracer: Tracer | None
    ) -> None:
        self._metrics = metrics
        self._dialect_of = dialect_of
        self._tracer = tracer
        self._lines: list[bytes] = []  # not yet given to the writer
        self._batches: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._writer: logging.handlers.QueueListener | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            file = logging.handlers.RotatingFileHandler(
                directory / ACCESS_LOG, maxBytes=_MOST_BYTES, backupCount=_OLD_FILES, delay=True
            )
            self._writer = logging.handlers.QueueListener(self._batches, file)

    def start(self) -> None:
        if self._writer is not None:
            self._writer.start()

    def close(self) -> None:
        if self._writer is not None:
            self._flush()
            self._writer.stop()
            for handler in self._writer.handlers:
                handler.close()
        if self._tracer is not None:
            self._tracer.close()

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        account, started, status = open_account(), time.time(), 499  # 499: the client went away
        try:
            response = await handler(request)
            status = response.status
            return response
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        finally:
            account.end()
            if not account.forwarded:  # after the answer is sent: nobody waits for this
                seconds = time.perf_counter() - account.started
                asyncio.get_running_loop().call_soon(self._report, request, account, started, seconds, status)

    def _report(self, request: web.Request, account: Account, started: float, seconds: float, status: int) -> None:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        dialect = self._dialect_of(request.path)
        if account.traffic:
            self._measure(account, seconds, dialect)
        facts = {
            "at": round(started, 3),
            "method": request.method,
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            "queue_seconds": round(account.queue_s, 6),
            "first_token_seconds": None if account.first_token_s is None else round(account.first_token_s, 6),
            "prompt_tokens": account.prompt_tokens,
            "sampled_tokens": account.sampled_tokens,
            "key": account.key.id if account.key is not None else None,
            "session": account.session or None,
            "traffic": account.traffic or None,
            "model": account.model or None,
        }
        if self._writer is not None and route not in _POLLED:
            if not self._lines:
                asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)
            self._lines.append(to_bytes(facts))
        if self._tracer is not None:
            self._tracer.record(facts, started, started + seconds, request.headers)

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._batches.put(logging.makeLogRecord({"msg": b"\n".join(lines).decode()}))

    def _measure(self, account: Account, seconds: float, dialect: str) -> None:
        labels = (("traffic", account.traffic), ("model", account.model), ("dialect", dialect))
        self._metrics.observe("request_seconds", seconds, labels)
        self._metrics.observe("queue_seconds", account.queue_s, labels)
        if account.first_token_s is not None:
            self._metrics.observe("first_token_seconds", account.first_token_s, labels)
        self._metrics.merge("between_tokens_seconds", account.between_tokens, labels)
