"""Outcomes under load as other tools write them: `vllm bench serve`'s JSON, and aiperf's record of each request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from datetime import datetime
from statistics import fmean, median, pstdev
from typing import Any

from outrider.bench.client import Outcome
from outrider.bench.load import Load
from outrider.bench.statistics import percentile


def vllm_result(outcomes: Seq[Outcome], seconds: float, load: Load, model: str, backend: str) -> dict[str, Any]:
    """The object that `vllm bench serve --save-result --save-detailed` writes, with the same names and definitions.

    For a closed loop, request_rate is "inf" and max_concurrency is the number at once. Where the server tells each
    request's speculation, `spec_decode_*` are summed over the requests, and not read from /metrics.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    output = sum(outcome.output_tokens for outcome in good)
    given = sum(outcome.prompt_tokens for outcome in good)
    base = min((outcome.started for outcome in outcomes), default=0.0)
    result: dict[str, Any] = {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(outcomes),
        "request_rate": "inf" if load.rate is None else load.rate,
        "burstiness": 1.0,
        "max_concurrency": load.concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": given,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "request_goodput": None,
        "output_throughput": output / seconds,
        "total_token_throughput": (given + output) / seconds,
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [0 if outcome.error else outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.first for outcome in outcomes],
        "itls": [outcome.gaps for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.started - base for outcome in outcomes],
        "queue_times": [outcome.waited for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
        "max_output_tokens_per_s": _most_in_a_second(good, base),
        "max_concurrent_requests": _most_at_once(good),
        "rtfx": 0.0,
    }
    tpots = [(o.latency - o.first) / (o.output_tokens - 1) for o in good if o.output_tokens > 1]
    for name, values in (
        ("ttft", [outcome.first for outcome in good]),
        ("tpot", tpots),
        ("itl", [gap for outcome in good for gap in outcome.gaps]),
        ("e2el", [outcome.latency for outcome in good]),
    ):
        result |= _distribution(name, values)
    return result | spec_decode(good)


def spec_decode(outcomes: Seq[Outcome]) -> dict[str, Any]:
    """vLLM's `spec_decode_*`; empty where the server tells nothing of them, or nothing was drafted."""
    told = [outcome.spec for outcome in outcomes if outcome.spec]
    drafts, drafted, accepted = (
        sum(each.get(name) or 0 for each in told)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    if not drafted or not drafts:
        return {}
    histograms = [each.get("acceptance_histogram") or [] for each in told]
    longest = max(map(len, histograms))
    counts = [sum(each[i] for each in histograms if i < len(each)) for i in range(longest)]
    at = [sum(counts[depth:]) / drafts for depth in range(1, longest)]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": at,
    }


def prefix_hit_rate(outcomes: Seq[Outcome]) -> float | None:
    """Prompt tokens found in the cache over all prompt tokens; None where the server does not tell."""
    told = [(o.cached_tokens, o.prompt_tokens) for o in outcomes if not o.error and o.cached_tokens is not None]
    total = sum(given for _, given in told)
    return sum(cached for cached, _ in told) / total if total else None


def aiperf_records(outcomes: Seq[Outcome], engine: str) -> list[dict[str, Any]]:
    """One record for each request, as aiperf's `profile_export.jsonl` has them."""
    return [_aiperf_record(number, outcome, engine) for number, outcome in enumerate(outcomes)]


def _aiperf_record(number: int, outcome: Outcome, engine: str) -> dict[str, Any]:
    began = outcome.started_ns
    identity = f"{outcome.prompt}-{number}"
    metadata = {
        "session_num": number,
        "x_request_id": identity,
        "x_correlation_id": outcome.prompt,
        "conversation_id": outcome.prompt,
        "turn_index": outcome.turn,
        "request_start_ns": began,
        "request_ack_ns": None,
        "request_end_ns": began + round(1e9 * outcome.latency),
        "worker_id": "worker_0",
        "record_processor_id": "record_processor_0",
        "benchmark_phase": "profiling",
        "was_cancelled": False,
        "cancellation_time_ns": None,
    }
    if outcome.error:
        failed = {"code": outcome.status or None, "type": "RequestError", "message": outcome.error}
        return {"metadata": metadata, "metrics": {}, "error": failed}
    rest, tokens = outcome.latency - outcome.first, outcome.output_tokens
    metrics: dict[str, tuple[Any, str]] = {
        "input_sequence_length": (outcome.prompt_tokens, "tokens"),
        "output_sequence_length": (tokens, "tokens"),
        "output_token_count": (tokens, "tokens"),
        "request_latency": (1e3 * outcome.latency, "ms"),
        "time_to_first_token": (1e3 * outcome.first, "ms"),
        "inter_chunk_latency": ([1e3 * gap for gap in outcome.gaps], "ms"),
    }
    if tokens > 1 and rest > 0:
        metrics["inter_token_latency"] = (1e3 * rest / (tokens - 1), "ms")
        metrics["output_token_throughput_per_user"] = ((tokens - 1) / rest, "tokens/sec/user")
    valued = {name: {"value": value, "unit": unit} for name, (value, unit) in metrics.items()}
    record = {"metadata": metadata, "metrics": valued, "error": None}
    return record if outcome.spec is None else record | {"spec_decode_acceptance": _acceptance(outcome.spec, engine)}


def _acceptance(spec: dict[str, Any], engine: str) -> dict[str, Any]:
    """aiperf's SpecDecodeAcceptanceRecord: its histogram is sparse."""
    names = ("mean_acceptance_length", "draft_acceptance_rate", "num_spec_steps")
    names += ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens")
    histogram = {str(i): count for i, count in enumerate(spec.get("acceptance_histogram") or ()) if count}
    return {"engine": engine, "acceptance_histogram": histogram} | {name: spec.get(name) for name in names}


def _distribution(name: str, values: Seq[float]) -> dict[str, float]:
    """Mean, median, standard deviation and 99th percentile in milliseconds; 0 without values, as in vLLM."""
    values = values or [0.0]
    return {
        f"mean_{name}_ms": 1e3 * fmean(values),
        f"median_{name}_ms": 1e3 * median(values),
        f"std_{name}_ms": 1e3 * pstdev(values),
        f"p99_{name}_ms": 1e3 * percentile(values, 99),
    }


def _most_in_a_second(outcomes: Seq[Outcome], base: float) -> float:
    """The most chunks that came in one second; seconds are counted from the first request's start."""
    seconds: dict[int, int] = {}
    for outcome in outcomes:
        for at in outcome.pieces:
            seconds[int(at - base)] = seconds.get(int(at - base), 0) + 1
    return float(max(seconds.values(), default=0))


def _most_at_once(outcomes: Seq[Outcome]) -> int:
    """The most requests under way at one time; at equal times, an end counts before a start."""
    events = sorted([(o.started, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes])
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
