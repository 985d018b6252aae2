"""Spans of a request, through the real door, in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.tracing import ENDPOINT, Tracing, tracing

PROMPT = "vermilion and nothing else"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider.get_tracer("test"))
    yield exporter
    tracing.use(None)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def ask(world: Any, **changes: Any) -> Any:
    message: list[Any] = [{"role": "user", "content": PROMPT}]
    return await world.client("aurora").chat.completions.create(model="simulated", messages=message, **changes)


async def test_a_stream_is_a_request_with_admission_queue_steps_and_stream_below_it(world: Any, spans: Any) -> None:
    stream = await ask(world, stream=True, extra_headers={"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"})
    async for _ in stream:
        pass
    await world.until(lambda: "chat" in by_name(spans))
    found = by_name(spans)
    root = found["chat"]

    assert set(found) == {"chat", "admission", "queue", "steps", "stream"}
    assert {format(span.context.trace_id, "032x") for span in found.values()} == {TRACE_ID}
    for name in ("admission", "queue", "steps", "stream"):
        assert found[name].parent.span_id == root.context.span_id, name
    assert found["queue"].end_time == found["steps"].start_time
    assert root.attributes is not None
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.request.model"] == "simulated"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert root.attributes["gen_ai.usage.output_tokens"] > 0
    assert root.attributes["rubato.tenant"] == "aurora"
    assert root.attributes["rubato.class"] == "default"
    assert root.attributes["http.response.status_code"] == 200


async def test_no_text_and_no_key_is_on_any_span(world: Any, spans: Any) -> None:
    answer = await ask(world)
    await world.until(lambda: "chat" in by_name(spans))
    told = " ".join(span.to_json() for span in spans.get_finished_spans())

    assert PROMPT not in told
    assert answer.choices[0].message.content not in told
    assert world.keys["aurora"] not in told


async def test_a_refusal_is_a_span_with_its_status(world: Any, spans: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        await world.client("aurora").chat.completions.create(model="simulated", messages=[])
    await world.until(lambda: "chat" in by_name(spans))

    assert by_name(spans)["chat"].attributes["http.response.status_code"] == 400
    assert "steps" not in by_name(spans)


async def test_without_a_tracer_nothing_is_made(world: Any) -> None:
    tracing.use(None)

    assert (await ask(world)).choices[0].message.content


def test_an_endpoint_without_the_extra_is_said_and_serving_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    own = Tracing()
    with caplog.at_level(logging.ERROR):
        own.start_from_environment({ENDPOINT: "http://localhost:4318"})
        own.start_from_environment({})

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the extra 'otel' is not installed" in caplog.text
