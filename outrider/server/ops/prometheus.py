"""The metrics in Prometheus' text format: our own names, and vLLM's for its tools and dashboards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from outrider.engine.stats import Tally
from outrider.server.ops.metrics import Histogram, MetricsCollector, ServerMetrics
from outrider.server.queue.backend import Backend
from outrider.server.queue.observers import QueueSnapshot

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_STATES = ("loading", "ready", "draining", "dead")
MAX_POSITIONS = 64
MAX_DRAFTERS = 32
FINISHES = ("stop", "length", "cancelled", "error", "scored")


class PrometheusExporter:
    """A registry over one server's metrics; `text` is the response of /metrics."""

    def __init__(self, backend: Backend, metrics: MetricsCollector, model: str) -> None:
        self.backend, self.metrics, self.model = backend, metrics, model
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return ()  # the names are fixed: nothing to check when registering

    def collect(self) -> Iterator[Metric]:
        values, now = self.metrics.values(), self.backend.snapshot()
        yield from state_metrics(now)
        yield from _engine_metrics(now)
        yield from request_metrics(values)
        yield from _pass_metrics(values)
        yield from _speculation_metrics(values)
        yield from _vllm_metrics(values, self.model)


def state_metrics(now: QueueSnapshot) -> Iterator[Metric]:
    """The state, and the numbers of running and waiting sequences."""
    state = GaugeMetricFamily("outrider_state", "1 for the state the server is in.", labels=["state"])
    for name in ENGINE_STATES:
        state.add_metric([name], name == now.state)
    yield state
    for name, value, meaning in (
        ("requests_running", now.running, "Sequences in the batch."),
        ("requests_waiting", now.waiting, "Sequences that wait for the batch."),
    ):
        yield GaugeMetricFamily(f"outrider_{name}", meaning, value=value)


def _engine_metrics(now: QueueSnapshot) -> Iterator[Metric]:
    """The cache of an engine of this process, and what it compiled late."""
    for name, value, meaning in (
        ("pages_used", now.pages_used, "Cache pages in use."),
        ("pages_total", now.pages_total, "Cache pages in all."),
    ):
        yield GaugeMetricFamily(f"outrider_{name}", meaning, value=value)
    for name, value, meaning in (
        (
            "compilations",
            now.late_work.compilations,
            "Kernels compiled and passes captured since the engine was ready.",
        ),
        ("device_allocations", now.late_work.device_allocations, "Allocations of device memory since then."),
    ):
        yield CounterMetricFamily(f"outrider_{name}_since_ready", meaning, value=value)


def request_metrics(values: ServerMetrics) -> Iterator[Metric]:
    """Requests, their tokens and their times."""
    http = CounterMetricFamily("outrider_http_requests", "Responses, by route and status.", labels=["route", "status"])
    for (route, status), count in sorted(values.http.items()):
        http.add_metric([route, str(status)], count)
    yield http
    finished = CounterMetricFamily("outrider_requests", "Sequences that ended, by reason.", labels=["finish_reason"])
    for reason in FINISHES:
        finished.add_metric([reason], values.finished[reason])
    yield finished
    stats = values.stats
    for name, value, meaning in (
        ("prompt_tokens", stats.prompt_tokens, "Prompt tokens."),
        ("cached_prompt_tokens", stats.shared_tokens, "Prompt tokens found in the cache."),
        ("generation_tokens", stats.tokens, "Generated tokens."),
    ):
        yield CounterMetricFamily(f"outrider_{name}", meaning, value=value)
    for name, histogram, meaning in (
        ("request_queue_time", values.queue, "From a sequence's arrival to its joining the batch."),
        ("time_to_first_token", values.first_token, "From a sequence's arrival to its first token."),
        ("e2e_request_latency", values.end_to_end, "From a sequence's arrival to its end."),
    ):
        yield _histogram(f"outrider_{name}_seconds", meaning, histogram)


def _pass_metrics(values: ServerMetrics) -> Iterator[Metric]:
    """What an engine of this process counts in its passes."""
    stats, meaning = values.stats, "Between tokens: a round's time divided by its tokens."
    yield _histogram("outrider_inter_token_latency_seconds", meaning, values.inter_token)
    meaning = "Sequences that failed because the model's logits were NaN or infinite."
    yield CounterMetricFamily("outrider_corrupted_requests", meaning, value=values.corrupted)
    for name, value, meaning in (
        ("target_passes", stats.passes, "Passes of the target, counted for each sequence in them."),
        ("preemptions", stats.preemptions, "Times a sequence lost its pages to another and was prefilled again."),
    ):
        yield CounterMetricFamily(f"outrider_{name}", meaning, value=value)


def _speculation_metrics(values: ServerMetrics) -> Iterator[Metric]:
    """Speculation by drafter, and by position in its drafts."""
    drafts = CounterMetricFamily("outrider_spec_drafts", "Drafts the target verified.", labels=["drafter"])
    drafted = CounterMetricFamily("outrider_spec_draft_tokens", "Tokens drafted.", labels=["drafter"])
    accepted = CounterMetricFamily("outrider_spec_accepted_tokens", "Drafted tokens accepted.", labels=["drafter"])
    rejected = CounterMetricFamily("outrider_spec_refusals", "Drafts with a rejected token.", labels=["drafter"])
    labels = ["drafter", "position"]
    reached = CounterMetricFamily("outrider_spec_drafts_per_pos", "Drafts that reached this position.", labels=labels)
    accepted_at = CounterMetricFamily("outrider_spec_accepted_tokens_per_pos", "Tokens accepted there.", labels=labels)
    for name, tally in _by_drafter(values).items():
        drafts.add_metric([name], tally.rounds)
        drafted.add_metric([name], tally.drafted)
        accepted.add_metric([name], tally.accepted)
        rejected.add_metric([name], tally.rejected)
        _by_position(reached, tally.drafted_at, [name])
        _by_position(accepted_at, tally.accepted_at, [name])
    yield from (drafts, drafted, accepted, rejected, reached, accepted_at)


def _vllm_metrics(values: ServerMetrics, model: str) -> Iterator[Metric]:
    """vLLM's four counters over all drafters, with vLLM's labels; `vllm bench serve` reads them."""
    tally = Tally()
    for each in values.stats.drafters.values():
        tally.add(each)
    labels, label_values = ["model_name", "engine"], [model, "0"]
    for name, value, meaning in (
        ("drafts", tally.rounds, "Drafts."),
        ("draft_tokens", tally.drafted, "Tokens drafted."),
        ("accepted_tokens", tally.accepted, "Drafted tokens accepted."),
    ):
        family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", meaning, labels=labels)
        family.add_metric(label_values, value)
        yield family
    name, meaning = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted at each position."
    positions = CounterMetricFamily(name, meaning, labels=[*labels, "position"])
    _by_position(positions, tally.accepted_at, label_values)
    yield positions


def _by_position(family: CounterMetricFamily, counts: list[int], values: list[str]) -> None:
    """One sample for each position, up to MAX_POSITIONS."""
    for position, count in enumerate(counts[:MAX_POSITIONS]):
        family.add_metric([*values, str(position)], count)


def _by_drafter(values: ServerMetrics) -> dict[str, Tally]:
    """Each drafter's tally, up to MAX_DRAFTERS."""
    return {name: values.stats.drafters[name] for name in sorted(values.stats.drafters)[:MAX_DRAFTERS]}


def _histogram(name: str, meaning: str, histogram: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), below))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=histogram.sum)
