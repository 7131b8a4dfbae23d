"""OpenTelemetry traces, by configuration (`gateway.traces`). One span per request, with the facts of the access log.

Needs `pip install 'rollmill[tracing]'`. Nothing of it is imported while traces are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.errors import ConfigError


class Tracer:
    def __init__(self, url: str) -> None:
        """Sends spans to an OTLP collector at `url`, such as http://localhost:4318/v1/traces, in a thread."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "gateway.traces needs OpenTelemetry",
                hint="pip install 'rollmill[tracing]', or leave gateway.traces out",
            ) from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "rollmill-gateway"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("rollmill.gateway")

    def record(self, facts: Mapping[str, Any], start: float, end: float, headers: Mapping[str, str]) -> None:
        """A request that has ended. A `traceparent` in its headers makes the span a part of the caller's trace."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            f"{facts['method']} {facts['route']}",
            context=TraceContextTextMapPropagator().extract({key.lower(): value for key, value in headers.items()}),
            kind=SpanKind.SERVER,
            start_time=int(start * 1e9),
            attributes={f"rollmill.{name}": value for name, value in facts.items() if value is not None},
        )
        span.end(int(end * 1e9))

    def close(self) -> None:
        """Sends what is left; waits a few seconds at most."""
        self._provider.shutdown()
