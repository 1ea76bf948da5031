"""Traces: one span a request that asked for text, judged by what the SDK's own exporter received."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from operation_world import Running, serving

from outrider.core.errors import ConfigError
from outrider.server import app
from outrider.server.ops.tracing import RequestTracer, connect_tracer

CANARY = "kanarienvogel"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(app, "connect_tracer", lambda _, model: RequestTracer(model, SimpleSpanProcessor(exporter)))
    with serving(otlp_endpoint="http://collector:4318") as running:
        yield running, exporter


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def told(running: Running, exporter: InMemorySpanExporter, request_id: str) -> ReadableSpan:
    running.heard.of(request_id)  # the span is written before the line
    (span,) = [span for span in exporter.get_finished_spans() if attributes(span)["outrider.request.id"] == request_id]
    return span


def test_a_span_says_what_the_answer_says_and_nobody_s_words(traced: tuple[Running, InMemorySpanExporter]):
    running, exporter = traced
    trace = "0af7651916cd43dd8448eb211c80319c"
    with running.client() as client:
        answer = client.post(
            "/v1/completions",
            json={"prompt": CANARY, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
            headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
        )
        client.get("/v1/models")
    made = answer.json()
    span = told(running, exporter, answer.headers["x-request-id"])
    spec, usage, said = made["metrics"]["speculative_decoding"], made["usage"], attributes(span)
    first = said.pop("gen_ai.server.time_to_first_token")
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "outrider.request.id": answer.headers["x-request-id"],
        "outrider.spec.draft_tokens": spec["num_draft_tokens"],
        "outrider.spec.accepted_tokens": spec["num_accepted_draft_tokens"],
    }
    assert span.name == "text_completion toy"
    assert span.kind == SpanKind.SERVER
    assert span.parent is not None
    assert span.parent.trace_id == int(trace, 16)
    assert span.parent.span_id == 0xB7AD6B7169203331
    assert span.start_time is not None
    assert span.end_time is not None
    assert isinstance(first, float)
    assert 0 < first <= (span.end_time - span.start_time) / 1e9
    assert len(exporter.get_finished_spans()) == 1  # none for /v1/models
    assert CANARY not in span.to_json()


def test_a_request_refused_has_a_span_too_and_a_mangled_parent_is_nobody_s(
    traced: tuple[Running, InMemorySpanExporter],
):
    running, exporter = traced
    with running.client() as client:
        answer = client.post(
            "/v1/chat/completions", json={"messages": CANARY}, headers={"traceparent": f"00-{CANARY}-1-1"}
        )
    span = told(running, exporter, answer.headers["x-request-id"])
    assert answer.status_code == 400
    assert attributes(span)["http.response.status_code"] == 400
    assert attributes(span)["gen_ai.usage.output_tokens"] == 0
    assert span.parent is None
    assert span.status.status_code == StatusCode.UNSET
    assert CANARY not in span.to_json()


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def hidden(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", hidden)
    with pytest.raises(ConfigError, match=r"outrider\[telemetry\]"):
        connect_tracer("http://localhost:4318", "toy")


def test_an_endpoint_is_an_http_address():
    with pytest.raises(ConfigError, match="http or https"):
        connect_tracer("localhost:4317", "toy")
    made = connect_tracer("http://127.0.0.1:9", "toy")
    made.close()
