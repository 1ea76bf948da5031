"""The metrics of a server with replicas: its own, those of each replica, and vLLM's counters of speculation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from outrider.remote.front import Front
from outrider.remote.upstream import get
from outrider.server.ops.metrics import MetricsCollector
from outrider.server.ops.prometheus import request_metrics, state_metrics

SCRAPE_SECONDS = 1.0
PREFIX = "vllm:spec_decode_num_"
Counts = Counter[tuple[str, str]]
"""A counter's value by its name and its `position` label, which is empty where it has none."""


class RemoteExporter:
    """Asks the replicas for their counters, and writes all metrics as text."""

    def __init__(self, front: Front, metrics: MetricsCollector, model: str) -> None:
        self.front, self.metrics, self.model = front, metrics, model
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._counts: dict[str, Counts] = {}
        """The last known counters of each replica; they stay while the replica cannot be reached."""

    async def text(self) -> bytes:
        await asyncio.gather(*(self._scrape(replica.url) for replica in self.front.pool.usable()))
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return ()  # the names are fixed: nothing to check when registering

    def collect(self) -> Iterator[Metric]:
        yield from state_metrics(self.front.snapshot())
        yield from request_metrics(self.metrics.values())
        yield from self._replicas()
        yield from self._speculation()

    async def _scrape(self, url: str) -> None:
        try:
            status, raw = await get(self.front.client, url, "/metrics", SCRAPE_SECONDS)
            if status == 200:
                self._counts[url] = speculation_counts(raw.decode())
        except (OSError, ValueError):  # a timeout is an OSError
            return

    def _replicas(self) -> Iterator[Metric]:
        labels = ["replica"]
        up = GaugeMetricFamily("outrider_replica_ready", "1 where the replica is ready.", labels=labels)
        load = GaugeMetricFamily("outrider_replica_running", "Sequences given to it and not ended.", labels=labels)
        sent = CounterMetricFamily("outrider_replica_requests", "Requests given to it.", labels=labels)
        failed = CounterMetricFamily("outrider_replica_failures", "Requests that failed there.", labels=labels)
        for i, replica in enumerate(self.front.pool.replicas):
            for family, value in (
                (up, replica.state == "ready"),
                (load, replica.load),
                (sent, replica.requests),
                (failed, replica.failures),
            ):
                family.add_metric([str(i)], value)
        yield from (up, load, sent, failed)
        if self.front.child is not None:
            meaning = "Times the engine's process was started again."
            yield CounterMetricFamily("outrider_engine_restarts", meaning, value=self.front.child.restarts)

    def _speculation(self) -> Iterator[Metric]:
        """vLLM's counters, summed over the replicas, under the names and labels that vLLM has for them."""
        total: Counts = Counter()
        for counts in self._counts.values():
            total.update(counts)
        families: dict[str, CounterMetricFamily] = {}
        for (name, position), value in sorted(total.items()):
            labels = ["model_name", "engine", *(["position"] if position else [])]
            family = families.setdefault(name, CounterMetricFamily(name, "Summed over replicas.", labels=labels))
            family.add_metric([self.model, "0", *([position] if position else [])], value)
        yield from families.values()


def speculation_counts(text: str) -> Counts:
    """vLLM's counters of speculation in the text of /metrics. ValueError where it is no such text."""
    found: Counts = Counter()
    lines = "\n".join(line for line in text.splitlines() if line.startswith(PREFIX) and "_total" in line)
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            found[sample.name.removesuffix("_total"), sample.labels.get("position", "")] += int(sample.value)
    return found
