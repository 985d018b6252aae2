"""Spans of requests on /v1 for OpenTelemetry: request, admission, queue, steps, stream, under their GenAI names.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT is set and the extra ``otel`` is installed; then nothing is imported and nothing
is made. Knows names and durations; refuses to know texts: neither prompts nor answers are ever on a span.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from wire.messages import EngineCounters, Finished

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "generate_content",
}


_request: ContextVar[Span | None] = ContextVar("traced_request", default=None)


class Tracing:
    """Always: without a tracer every call here does nothing."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None

    def use(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def start_from_environment(self, environment: Mapping[str, str] = os.environ) -> None:
        """Export to the endpoint that the environment names, by OTLP over HTTP."""
        if not environment.get(ENDPOINT):
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            log.error("%s is set, and the extra 'otel' is not installed: there are no traces", ENDPOINT)
            return
        provider = TracerProvider(resource=Resource.create({"service.name": "rubato-gateway"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("gateway")

    @contextmanager
    def request(self, method: str, path: str, headers: Any, request_id: str) -> Iterator[Span | None]:
        """The span of one request of /v1, current inside; goes on with the caller's trace where it brings one."""
        if self._tracer is None:
            yield None
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        parent = TraceContextTextMapPropagator().extract(carrier)
        operation = _OPERATIONS.get(path)
        attributes = {"http.request.method": method, "rubato.request_id": request_id}
        if operation is not None:
            attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "rubato"}
        name = operation or f"{method} /v1"
        with self._tracer.start_as_current_span(name, parent, SpanKind.SERVER, attributes=attributes) as span:
            token = _request.set(span)
            try:
                yield span
            finally:
                _request.reset(token)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A span under the request that is under way; none where no request is traced."""
        if self._current() is None or self._tracer is None:
            yield
            return
        with self._tracer.start_as_current_span(name):
            yield

    def say(self, **attributes: str | int | None) -> None:
        """Attributes of the request under way; a double underscore stands for a dot."""
        span = self._current()
        if span is not None:
            for name, value in attributes.items():
                if value is not None:
                    span.set_attribute(name.replace("__", "."), value)

    def finished(self, end: Finished) -> None:
        """The worker's part, told once it is over: its durations, counted back from now."""
        span = self._current()
        if span is None or self._tracer is None:
            return
        span.set_attribute("gen_ai.response.id", end.response_id)
        span.set_attribute("gen_ai.response.finish_reasons", [choice.reason for choice in end.choices])
        span.set_attribute("gen_ai.usage.input_tokens", end.prompt_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", end.cached_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", end.output_tokens)
        began_ns = time.time_ns() - end.counters.total_us * 1_000
        started_ns = began_ns + end.counters.queue_us * 1_000
        self._past("queue", began_ns, started_ns, _waits(end.counters))
        self._past("steps", started_ns, began_ns + end.counters.total_us * 1_000, _steps(end.counters))

    def _past(self, name: str, began_ns: int, ended_ns: int, attributes: Mapping[str, int]) -> None:
        if self._tracer is not None and (request := _request.get()) is not None:
            from opentelemetry.trace import set_span_in_context

            context = set_span_in_context(request)
            span = self._tracer.start_span(name, context, start_time=began_ns, attributes=dict(attributes))
            span.end(ended_ns)

    def _current(self) -> Span | None:
        return None if self._tracer is None else _request.get()


def _waits(counters: EngineCounters) -> dict[str, int]:
    """Microseconds by cause, of the wait before the first start."""
    found: dict[str, int] = {}
    for phase, cause, held_by, wait_us in counters.waits:
        if phase == "queued":
            name = f"rubato.wait.{cause}" + (f".{held_by}" if held_by else "")
            found[name] = found.get(name, 0) + wait_us
    return found


def _steps(counters: EngineCounters) -> dict[str, int]:
    found = {
        "rubato.steps": counters.num_steps,
        "rubato.holds": counters.num_holds,
        "rubato.swaps": counters.num_swaps,
        "rubato.recomputes": counters.num_recomputes,
        "rubato.gpu_us": counters.gpu_us,
    }
    if counters.ttft_us is not None:
        found["rubato.time_to_first_token_us"] = counters.ttft_us
    return found


tracing = Tracing()
