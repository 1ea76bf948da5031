"""Measure a server under each load, with speculation on and off where it can be switched, alternately."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench.client import Client, Outcome
from outrider.bench.load import Load, put_under_load
from outrider.bench.offline import Tell
from outrider.bench.prompts import BenchPrompt
from outrider.bench.record import Line, RunFile
from outrider.bench.scrape import scrape
from outrider.bench.serve_figures import aiperf_records, prefix_hit_rate, vllm_result
from outrider.bench.statistics import Estimate, median_estimate
from outrider.core.errors import ConfigError
from outrider.prove.api import Api, ServerKind

SERVED = "as served"
LONG = ("generated_texts", "itls", "latencies", "start_times", "queue_times", "input_lens", "ttfts")
"""Lists that are written to an export, and not to a run's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """The loads, and the options of the requests that are sent."""

    loads: tuple[Load, ...]
    count: int
    """Conversations of each load."""
    repeats: int = 3
    max_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0


class ServeBench:
    """Measures every load of a run that its file does not hold yet."""

    def __init__(
        self,
        api: Api,
        kind: ServerKind,
        prompts: Seq[BenchPrompt],
        plan: ServePlan,
        run: RunFile,
        export: Path | None = None,
    ) -> None:
        """kind: what `api.kind()` says. export: a folder for vLLM's and aiperf's files."""
        self.kind, self.prompts, self.plan, self.run, self.export = kind, prompts, plan, run, export
        self.model = api.model or ""
        options = {"max_tokens": plan.max_tokens, "temperature": plan.temperature, "seed": plan.seed}
        self.client = Client(api.url, api.model, options, api.key)
        self.conditions: dict[str, dict[str, Any]] = {SERVED: {}}
        if self.kind.off is not None:
            self.conditions = {"on": {}, "off": self.kind.off}

    def measure_all(self, tell: Tell) -> None:
        """Measure what is missing. The conditions alternate, and each repetition begins with the next one."""
        plan, names = self.plan, list(self.conditions)
        total, done = len(plan.loads) * plan.repeats * len(names), 0
        for load in plan.loads:
            for repetition in range(plan.repeats):
                first = repetition % len(names)
                for name in (*names[first:], *names[:first]):
                    place = {"load": asdict(load), "speculation": name, "repetition": repetition}
                    if self.run.find("measure", **place) is None:
                        tell(f"{load.name}, speculation {name}, repetition {repetition + 1}", done, total)
                        self.run.add({"part": "measure", **place} | self._measure(load, name, repetition))
                    done += 1

    def _measure(self, load: Load, condition: str, repetition: int) -> Line:
        options = dict(self.conditions[condition])
        if self.kind.salt:  # caches are shared within a measurement, and with no other one
            options[self.kind.salt] = f"bench {self.run.header['began']} {load.name} {condition} {repetition}"
        seed, client = self.plan.seed + repetition, self.client
        before = scrape(client.url, client.authorization)
        outcomes, seconds = put_under_load(client, self.prompts, load, count=self.plan.count, seed=seed, **options)
        counters = scrape(client.url, client.authorization).since(before)
        if all(outcome.error for outcome in outcomes):
            raise ConfigError(f"{self.client.url} answered none of {len(outcomes)} requests: {outcomes[0].error[:300]}")
        # what each response tells is of these requests alone; the counters are of all that the server did meanwhile
        result = counters.spec_decode() | vllm_result(outcomes, seconds, load, self.model, self.kind.name)
        hits = prefix_hit_rate(outcomes)
        if self.export is not None:
            name = f"{load.name}-{condition}-{repetition}".replace(" ", "-")
            self._write(self.export / f"{name}.json", json.dumps(result) + "\n")
            records = aiperf_records(outcomes, self.kind.name)
            self._write(self.export / f"{name}.profile_export.jsonl", "".join(json.dumps(r) + "\n" for r in records))
        short = {name: value for name, value in result.items() if name not in LONG}
        hits = counters.prefix_hit_rate() if hits is None else hits
        return short | {"prefix_hit_rate": hits, "texts": _digests(outcomes)}

    @staticmethod
    def _write(file: Path, text: str) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--export {file}: {error.strerror or error}") from error


def _digests(outcomes: Seq[Outcome]) -> dict[str, str]:
    """The digest of each answered turn's text. Of a prompt that was sent several times, the first counts."""
    found: dict[str, str] = {}
    for outcome in outcomes:
        if not outcome.error:
            digest = sha256(outcome.text.encode()).hexdigest()[:16]
            found.setdefault(f"{outcome.prompt} {outcome.turn}", digest)
    return found


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """One load under one condition: medians over the repetitions."""

    load: dict[str, Any]
    speculation: str
    repetitions: int
    failed: int
    output_throughput: Estimate
    request_throughput: float
    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float
    p99_e2el_ms: float
    speedup: Estimate | None
    """Against speculation off in the same repetition; None where that was not measured."""
    identical: tuple[int, int] | None
    """Texts equal to those without speculation, and how many were compared, in the worst repetition."""
    prefix_hit_rate: float | None
    acceptance_length: float | None

    @property
    def name(self) -> str:
        return Load(**self.load).name

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_serve(run: RunFile) -> list[LoadSummary]:
    lines = run.of("measure")
    keys = {(json.dumps(line["load"]), line["speculation"]): None for line in lines}
    found: list[LoadSummary] = []
    for load, condition in keys:
        same = [line for line in lines if json.dumps(line["load"]) == load]
        own = [line for line in same if line["speculation"] == condition]
        off = {line["repetition"]: line for line in same if line["speculation"] == "off"}
        found.append(_load_summary(json.loads(load), condition, own, off))
    return found


def _load_summary(load: dict[str, Any], condition: str, lines: Seq[Line], off: dict[int, Line]) -> LoadSummary:
    def middle(name: str) -> float:
        return median(line[name] for line in lines)

    pairs = [(line, off[line["repetition"]]) for line in lines if line["repetition"] in off and condition != "off"]
    equal = [_equal(line["texts"], other["texts"]) for line, other in pairs]
    hits = [line["prefix_hit_rate"] for line in lines if line["prefix_hit_rate"] is not None]
    lengths = [line["spec_decode_acceptance_length"] for line in lines if "spec_decode_acceptance_length" in line]
    ratios = [a["output_throughput"] / b["output_throughput"] for a, b in pairs if b["output_throughput"]]
    return LoadSummary(
        load=load,
        speculation=condition,
        repetitions=len(lines),
        failed=sum(line["failed"] for line in lines),
        output_throughput=median_estimate([line["output_throughput"] for line in lines]),
        request_throughput=middle("request_throughput"),
        median_ttft_ms=middle("median_ttft_ms"),
        p99_ttft_ms=middle("p99_ttft_ms"),
        median_tpot_ms=middle("median_tpot_ms"),
        p99_e2el_ms=middle("p99_e2el_ms"),
        speedup=median_estimate(ratios) if ratios else None,
        identical=min(equal, key=lambda each: each[0] - each[1]) if equal else None,
        prefix_hit_rate=median(hits) if hits else None,
        acceptance_length=median(lengths) if lengths else None,
    )


def _equal(ours: dict[str, str], theirs: dict[str, str]) -> tuple[int, int]:
    both = ours.keys() & theirs.keys()
    return sum(ours[each] == theirs[each] for each in both), len(both)
