"""OpenTelemetry: a span for every generation, with the attributes of its GenAI conventions.

The packages are those of the extra `otel`; nothing here is imported unless spans are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rootlace.runtime.processes import request_id
from rootlace.wire.errors import InvalidRequest, RootlaceError
from rootlace.wire.protocol import Generate, Generated, Timing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
_HEADERS: ContextVar[tuple[str, Mapping[str, str]]] = ContextVar("headers", default=("", {}))


def note_request(path: str, headers: Mapping[str, str]) -> None:
    """What the current task works for: spans of it continue the trace that `headers` name."""
    _HEADERS.set((path, headers))


def exporter_class() -> Any:
    """Of spans to a collector. Raises InvalidRequest where its packages are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise InvalidRequest(
            f"--otlp needs OpenTelemetry's packages: pip install 'rootlace[otel]' ({error})"
        ) from error
    return OTLPSpanExporter


class Spans:
    """Sends spans to where `exporter` does, from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import DEFAULT_ON
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation import tracecontext

        version = metadata.version("rootlace")
        resource = Resource({"service.name": "rootlace", "service.version": version})
        # Who began a trace decides whether it is sampled.
        self._provider = TracerProvider(sampler=DEFAULT_ON, resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rootlace", version)
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = lambda error: Status(StatusCode.ERROR, str(error))

    @classmethod
    def to(cls, endpoint: str) -> Spans | None:
        """To an OpenTelemetry collector, such as http://localhost:4318/v1/traces; None for "".
        Raises InvalidRequest where the packages are missing."""
        return cls(exporter_class()(endpoint=endpoint)) if endpoint else None

    def generated(
        self,
        model: str,
        program: str,
        op: Generate,
        result: Generated | RootlaceError,
        timing: Timing,
    ) -> None:
        """A generation has just ended, well or not."""
        end = time.time_ns()
        path, headers = _HEADERS.get()
        operation = "chat" if path in _CHATS else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._propagator.extract(headers),
            kind=self._kind,
            start_time=end - int(timing.total * 1e9),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "rootlace",
                "gen_ai.request.model": model,
                **_asked(op),
                **{
                    name: value
                    for name, value in (
                        ("url.path", path),
                        ("rootlace.request_id", request_id.get()),
                        ("rootlace.program", program),
                    )
                    if value
                },
            },
        )
        for name, seconds in (("admitted", timing.queued), ("first_token", timing.first_token)):
            if 0 < seconds < timing.total:
                at = end - int((timing.total - seconds) * 1e9)
                span.add_event(name, {"seconds": seconds}, at)
        if isinstance(result, Generated):
            span.set_attributes(_found(model, result, timing))
        else:
            span.set_attribute("error.type", result.code)
            span.set_status(self._failed(result))
        span.add_event("end", timestamp=end)
        span.end(end)

    def flush(self) -> None:
        """Send what is waiting to be sent."""
        self._provider.force_flush()


def _asked(op: Generate) -> dict[str, Any]:
    params = op.params
    given: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "stop_sequences": params.stop or None,
        "choice.count": params.n,
        "stream": op.stream,
    }
    return {f"gen_ai.request.{name}": value for name, value in given.items() if value is not None}


def _found(model: str, result: Generated, timing: Timing) -> dict[str, Any]:
    usage = result.usage
    return {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [output.finish_reason for output in result.outputs],
        "gen_ai.response.time_to_first_chunk": timing.first_token,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "rootlace.usage.forced_tokens": usage.forced_tokens,
    }
