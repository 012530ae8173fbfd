"""Metrics of the server for Prometheus, and spans of generations for OpenTelemetry.

The engine's counters are added when asked for. Spans have the attributes of OpenTelemetry's GenAI
conventions; packages of the extra `otel` are imported only for spans.

Sections: metrics, spans.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from importlib import metadata
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rootlace.runtime.processes import request_id
from rootlace.wire.errors import InvalidRequest, RootlaceError
from rootlace.wire.protocol import DRAFT_SOURCES, Generate, Generated, Timing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# Metrics ------------------------------------------------------------------------------------------


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "rootlace_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)

# Gauges of the status; all other values are counters since the start.
_GAUGES = (
    *("waiting", "running", "compiling", "nodes", "tree_tokens", "blocks_pinned", "pins"),
    *("sessions", "branches", "prefixes_known", "prefixes_below"),
    *("disk_blocks", "disk_working", "disk_full", "disk_failed"),
    *("host_blocks", "handed_blocks", "handed_working", "indexed_tokens", "index_bytes"),
)
# Counters shown as one metric with a label: (name, help, label, the counters by value).
_LABELLED = (
    (
        "tokens",
        "Tokens: found in the cache, computed, sampled, and forced by constraints.",
        "kind",
        {
            "cached": "cached_tokens",
            "computed": "computed_tokens",
            "sampled": "output_tokens",
            "forced": "forced_tokens",
        },
    ),
    *(
        (
            f"{kind}_tokens_by",
            f"Tokens computed ahead{so}, by where they were from.",
            "source",
            {source: f"{kind}_{source}_tokens" for source in DRAFT_SOURCES},
        )
        for kind, so in (("drafted", ""), ("accepted", " that were sampled so"))
    ),
    (
        "requests_finished",
        "Requests that ended, by reason.",
        "reason",
        {reason: f"requests_{reason}" for reason in ("stop", "length", "abort", "error")},
    ),
)
_BLOCKS = {state: f"blocks_{state}" for state in ("free", "used", "evictable")}


class Metrics:
    """Histograms of the requests' waiting times, and counters, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.first = self._histogram("time_to_first_token", "Until the first token.", _SECONDS)
        self.between = self._histogram(
            "time_per_output_token", "Between tokens, the mean of a request.", _TOKEN_SECONDS
        )
        self.whole = self._histogram("request_duration", "Until the end of a request.", _SECONDS)
        self.queued = self._histogram("queue_duration", "Until it was admitted.", _SECONDS)
        self.http = Counter(
            _PREFIX + "http_requests",
            "Replies that were begun, by path and status.",
            ("path", "status"),
            registry=self._registry,
        )

        self._keys = Counter(
            _PREFIX + "key_usage",
            "Requests, refused ones and tokens, by the name of the API key.",
            ("key", "kind"),
            registry=self._registry,
        )

    def key_used(self, key: str, kind: str, amount: int) -> None:
        """Count usage of the API key named `key`."""
        self._keys.labels(key, kind).inc(amount)

    def of_requests(self) -> list[Metric]:
        """Return the metrics that concern no single model."""
        return [*self.http.collect(), *self._keys.collect()]

    def of_model(self) -> list[Metric]:
        """Return the histograms of one model's requests."""
        histograms = (self.first, self.between, self.whole, self.queued)
        return [family for one in histograms for family in one.collect()]

    def text(self, status: Mapping[str, Any] | None) -> bytes:
        """Write all metrics in Prometheus's format; `status` None: no engine answers."""
        return generate_latest(self._registry) + _written(_of_status(status))

    def _histogram(self, name: str, says: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}{name}_seconds", says, buckets=bounds, registry=self._registry)


Model = tuple[Metrics | None, Mapping[str, Any] | None]
"""Metrics of a model, None if not loaded, and its counters, None if its engine does not answer."""


def text_of_all(server: Metrics, models: Mapping[str, Model]) -> bytes:
    """Return the metrics of several models in Prometheus's format, with the label `model`."""
    of_models = {
        model: [*(metrics.of_model() if metrics else ()), *_of_status(status)]
        for model, (metrics, status) in models.items()
    }
    return _written([*server.of_requests(), *_by_label("model", of_models)])


class _Families(Collector):
    """Collector of finished families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _written(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


def _by_label(label: str, parts: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """Join families of one name, with a label that names each sample's part; samples of the part ""
    have no label."""
    metrics: dict[str, Metric] = {}
    for part, families in parts.items():
        own = {label: part} if part else {}
        for family in families:
            known = metrics.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            known.samples += [
                sample._replace(labels={**sample.labels, **own}) for sample in family.samples
            ]
    return metrics.values()


def _of_status(status: Mapping[str, Any] | None) -> Iterable[Metric]:
    """Turn counters of engine and server into metrics. Counters of one of several engines have the
    label `replica`, and no sum."""
    if status is None or "replicas" not in status:
        return _families(status)
    own: dict[str, dict[str, Any] | None] = {}
    for counters in status["replicas"]:
        counted = {name: each for name, each in counters.items() if name != "replica"}
        own[str(counters["replica"])] = counted if counters["up"] else None
    engines = {name for one in own.values() if one is not None for name in one}
    shared = {name: value for name, value in status.items() if name not in engines}
    parts = {replica: _families(one) for replica, one in own.items()}
    return _by_label("replica", {**parts, "": _numbers(shared)})


def _families(status: Mapping[str, Any] | None) -> Iterable[Metric]:
    up = GaugeMetricFamily(_PREFIX + "up", "Whether the engine answers.", value=status is not None)
    yield up
    if status is None:
        return
    told = set(_BLOCKS.values()) | {"blocks_total"}
    for name, says, label, parts in _LABELLED:
        family = CounterMetricFamily(_PREFIX + name, says, labels=(label,))
        for value, counter in parts.items():
            family.add_metric((value,), status.get(counter, 0))
        told |= set(parts.values())
        yield family
    blocks = GaugeMetricFamily(_PREFIX + "blocks", "Blocks of the KV pool.", labels=("state",))
    for state, name in _BLOCKS.items():
        blocks.add_metric((state,), status.get(name, 0))
    yield blocks
    prompt = status.get("prompt_tokens", 0)
    ratio = status.get("cached_tokens", 0) / prompt if prompt else 0.0
    yield GaugeMetricFamily(
        _PREFIX + "cache_hit_ratio", "Prompt tokens found, of all since the start.", value=ratio
    )
    yield from _numbers({name: each for name, each in status.items() if name not in told})


def _numbers(status: Mapping[str, Any]) -> Iterable[Metric]:
    """Give each number as a metric of its own name."""
    for name, value in status.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        says = f"`{name}` of docs/operations.md."
        family_type = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
        yield family_type(_PREFIX + name, says, value=value)


# Spans --------------------------------------------------------------------------------------------


_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
_HEADERS: ContextVar[tuple[str, Mapping[str, str]]] = ContextVar("headers", default=("", {}))


def note_request(path: str, headers: Mapping[str, str]) -> None:
    """Note the current task's request: spans continue the trace that `headers` name."""
    _HEADERS.set((path, headers))


def exporter_class() -> Any:
    """Import the exporter of spans. Raises InvalidRequest where its packages are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise InvalidRequest(
            f"--otlp needs OpenTelemetry's packages: pip install 'rootlace[otel]' ({error})"
        ) from error
    return OTLPSpanExporter


class Spans:
    """Sender of spans: exports them with `exporter`, from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import DEFAULT_ON
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation import tracecontext

        version = metadata.version("rootlace")
        resource = Resource({"service.name": "rootlace", "service.version": version})
        # The service that begins a trace decides whether the trace is sampled.
        self._provider = TracerProvider(sampler=DEFAULT_ON, resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rootlace", version)
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = lambda error: Status(StatusCode.ERROR, str(error))

    @classmethod
    def to(cls, endpoint: str) -> Spans | None:
        """Make a sender to an OpenTelemetry collector, such as http://localhost:4318/v1/traces;
        None for "". Raises InvalidRequest where the packages are missing."""
        return cls(exporter_class()(endpoint=endpoint)) if endpoint else None

    def generated(
        self,
        model: str,
        program: str,
        op: Generate,
        result: Generated | RootlaceError,
        timing: Timing,
    ) -> None:
        """Send the span of a generation that has just ended, well or not."""
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
                **_request_fields(op),
            },
        )
        for name, value in (
            ("url.path", path),
            ("rootlace.request_id", request_id.get()),
            ("rootlace.program", program),
        ):
            if value:
                span.set_attribute(name, value)
        for name, seconds in (("admitted", timing.queued), ("first_token", timing.first_token)):
            if 0 < seconds < timing.total:
                at = end - int((timing.total - seconds) * 1e9)
                span.add_event(name, {"seconds": seconds}, at)
        if isinstance(result, Generated):
            span.set_attributes(_response_fields(model, result, timing))
        else:
            span.set_attribute("error.type", result.code)
            span.set_status(self._failed(result))
        span.add_event("end", timestamp=end)
        span.end(end)

    def flush(self) -> None:
        """Send all waiting spans."""
        self._provider.force_flush()


def _request_fields(op: Generate) -> dict[str, Any]:
    params = op.params
    same = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "max_tokens")
    fields: dict[str, Any] = {name: getattr(params, name) for name in (*same, "seed")}
    fields |= {"stop_sequences": params.stop or None, "choice.count": params.n, "stream": op.stream}
    return {f"gen_ai.request.{name}": value for name, value in fields.items() if value is not None}


def _response_fields(model: str, result: Generated, timing: Timing) -> dict[str, Any]:
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
