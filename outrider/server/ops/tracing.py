"""OpenTelemetry: one span for each chat or completion request, with its metrics and none of its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.core.errors import ConfigError
from outrider.server.ops.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

EXPORT_SECONDS = 3  # how long a collector that does not answer may delay the server's shutdown
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class RequestTracer:
    """Writes a request's span after its response, so that the request does not wait for it."""

    def __init__(self, model: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self.model = model
        self.provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}), shutdown_on_exit=False)
        self.provider.add_span_processor(processor)
        self.tracer = self.provider.get_tracer("outrider.server")

    def export(self, record: RequestRecord) -> None:
        """Write one span, from the request's arrival to the end of its response."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        span = self.tracer.start_span(
            f"{operation} {self.model}",
            context=TraceContextTextMapPropagator().extract(record.trace),
            kind=SpanKind.SERVER,
            start_time=int(record.began * 1e9),
            attributes=self._attributes(operation, record),
        )
        if record.status >= 500 or "error" in record.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=int((record.began + record.seconds) * 1e9))

    def _attributes(self, operation: str, record: RequestRecord) -> Mapping[str, Any]:
        stats = record.stats
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.usage.input_tokens": stats.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.tokens,
            "gen_ai.usage.cache_read.input_tokens": stats.shared_tokens,
            "http.request.method": record.method,
            "http.route": record.route,
            "http.response.status_code": record.status,
            "outrider.request.id": record.id,
            "outrider.spec.draft_tokens": sum(tally.drafted for tally in stats.drafters.values()),
            "outrider.spec.accepted_tokens": sum(tally.accepted for tally in stats.drafters.values()),
        }
        if record.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = list(record.finish_reasons)
        if record.first_token_seconds is not None:
            attributes["gen_ai.server.time_to_first_token"] = record.first_token_seconds
        return attributes

    def close(self) -> None:
        """Send the remaining spans."""
        self.provider.shutdown()


def connect_tracer(endpoint: str, model: str) -> RequestTracer:
    """A tracer that sends spans to an OTLP collector over HTTP. ConfigError where the packages are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("--otlp-endpoint needs OpenTelemetry: pip install 'outrider[telemetry]'") from error
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-endpoint takes an http or https address, got {endpoint!r}")
    address = endpoint.rstrip("/")
    if not address.endswith("/v1/traces"):
        address += "/v1/traces"
    return RequestTracer(model, BatchSpanProcessor(OTLPSpanExporter(endpoint=address, timeout=EXPORT_SECONDS)))
