"""The figures as Prometheus reads them: our own names, and vLLM's for what its tools and dashboards look for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from outrider.engine.stats import Tally
from outrider.server.metrics import Figures, Histogram, Metrics
from outrider.server.worker import Snapshot, Worker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("loading", "ready", "draining", "dead")
MAX_POSITIONS = 64
MAX_DRAFTERS = 32
FINISHES = ("stop", "length", "cancelled", "error", "scored")


class Exposition:
    """A registry of its own over a server's figures; `text` is what /metrics answers."""

    def __init__(self, worker: Worker, metrics: Metrics, model: str) -> None:
        self.worker, self.metrics, self.model = worker, metrics, model
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return ()  # names are fixed: nothing to find out when registering

    def collect(self) -> Iterator[Metric]:
        figures, now = self.metrics.figures(), self.worker.snapshot()
        yield from _standing(now)
        yield from _requests(figures)
        yield from _tokens(figures)
        yield from _speculation(figures)
        yield from _as_vllm(figures, self.model)


def _standing(now: Snapshot) -> Iterator[Metric]:
    """Gauges: where the server stands."""
    state = GaugeMetricFamily("outrider_state", "1 for the state the server is in.", labels=["state"])
    for name in STATES:
        state.add_metric([name], name == now.state)
    yield state
    for name, value, meaning in (
        ("requests_running", now.running, "Texts in the batch."),
        ("requests_waiting", now.waiting, "Texts that wait for a place in the batch."),
        ("pages_used", now.pages_used, "Cache pages in use."),
        ("pages_total", now.pages_total, "Cache pages there are."),
    ):
        yield GaugeMetricFamily(f"outrider_{name}", meaning, value=value)


def _requests(figures: Figures) -> Iterator[Metric]:
    http = CounterMetricFamily("outrider_http_requests", "Answers, by route and status.", labels=["route", "status"])
    for (route, status), count in sorted(figures.http.items()):
        http.add_metric([route, str(status)], count)
    yield http
    finished = CounterMetricFamily("outrider_requests", "Texts that ended, by reason.", labels=["finish_reason"])
    for reason in FINISHES:
        finished.add_metric([reason], figures.finished[reason])
    yield finished
    meaning = "Texts that failed because the model's logits were NaN or infinite."
    yield CounterMetricFamily("outrider_corrupted_requests", meaning, value=figures.corrupted)
    for name, histogram, meaning in (
        ("request_queue_time", figures.queue, "From a text's arrival to its place in the batch."),
        ("time_to_first_token", figures.first, "From a text's arrival to its first token."),
        ("inter_token_latency", figures.pace, "Between tokens; a round's time is shared among what it brought."),
        ("e2e_request_latency", figures.whole, "From a text's arrival to its end."),
    ):
        yield _histogram(f"outrider_{name}_seconds", meaning, histogram)


def _tokens(figures: Figures) -> Iterator[Metric]:
    stats = figures.stats
    for name, value, meaning in (
        ("prompt_tokens", stats.prompt_tokens, "Prompt tokens."),
        ("cached_prompt_tokens", stats.shared_tokens, "Prompt tokens found in the cache."),
        ("generation_tokens", stats.tokens, "Tokens written."),
        ("target_passes", stats.passes, "Passes of the target, counted for each text in them."),
        ("preemptions", stats.preemptions, "Times a text lost its pages to another and was read again."),
    ):
        yield CounterMetricFamily(f"outrider_{name}", meaning, value=value)


def _speculation(figures: Figures) -> Iterator[Metric]:
    """For each drafter, and for each place in its drafts."""
    drafts = CounterMetricFamily("outrider_spec_drafts", "Drafts the target judged.", labels=["drafter"])
    drafted = CounterMetricFamily("outrider_spec_draft_tokens", "Tokens drafted.", labels=["drafter"])
    accepted = CounterMetricFamily("outrider_spec_accepted_tokens", "Drafted tokens that stood.", labels=["drafter"])
    refused = CounterMetricFamily("outrider_spec_refusals", "Drafts the target chose against.", labels=["drafter"])
    labels = ["drafter", "position"]
    reached = CounterMetricFamily("outrider_spec_drafts_per_pos", "Drafts that reached this place.", labels=labels)
    stood = CounterMetricFamily("outrider_spec_accepted_tokens_per_pos", "Tokens that stood there.", labels=labels)
    for name, tally in _by_drafter(figures).items():
        drafts.add_metric([name], tally.rounds)
        drafted.add_metric([name], tally.drafted)
        accepted.add_metric([name], tally.accepted)
        refused.add_metric([name], tally.refused)
        _by_position(reached, tally.drafted_at, [name])
        _by_position(stood, tally.accepted_at, [name])
    yield from (drafts, drafted, accepted, refused, reached, stood)


def _as_vllm(figures: Figures, model: str) -> Iterator[Metric]:
    """vLLM's four counters over all drafters, one line each, with vLLM's labels; `vllm bench serve` reads them."""
    tally = Tally()
    for each in figures.stats.drafters.values():
        tally.add(each)
    labels, values = ["model_name", "engine"], [model, "0"]
    for name, value, meaning in (
        ("drafts", tally.rounds, "Drafts."),
        ("draft_tokens", tally.drafted, "Tokens drafted."),
        ("accepted_tokens", tally.accepted, "Drafted tokens accepted."),
    ):
        family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", meaning, labels=labels)
        family.add_metric(values, value)
        yield family
    name, meaning = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted at each position."
    positions = CounterMetricFamily(name, meaning, labels=[*labels, "position"])
    _by_position(positions, tally.accepted_at, values)
    yield positions


def _by_position(family: CounterMetricFamily, counts: list[int], values: list[str]) -> None:
    """One line for each place; those beyond the last that has a line are left out."""
    for position, count in enumerate(counts[:MAX_POSITIONS]):
        family.add_metric([*values, str(position)], count)


def _by_drafter(figures: Figures) -> dict[str, Tally]:
    """Each drafter's tally; what many drafters would be is bounded, whatever they call themselves."""
    return {name: figures.stats.drafters[name] for name in sorted(figures.stats.drafters)[:MAX_DRAFTERS]}


def _histogram(name: str, meaning: str, histogram: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), below))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=histogram.sum)
