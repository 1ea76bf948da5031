"""Per-request metrics of speculation, as vLLM names them and as aiperf 0.13 reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server_world import Running, chunks_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "ababababab"}], "seed": 1, "max_tokens": 40},
    TEXT: {"prompt": "abababababab", "seed": 1, "max_tokens": 60},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "drafted": {"prediction": {"type": "content", "content": "the sea the sea the sea"}},
    "not drafted": {"speculation": {"off": True}},
    "two choices": {"n": 2},
}
FLOATS = ("mean_acceptance_length", "draft_acceptance_rate")
COUNTS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")


def roots(served: Running, path: str, body: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The answer whole, and as a stream with its usage."""
    yield [served.post(path, **body).json()]
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    yield list(chunks_of(served, path, streamed))


def read(answer: list[dict[str, Any]]) -> dict[str, Any]:
    """As aiperf does: the payload of the one root that has it, with exact types and sums."""
    (stats,) = [root["metrics"]["speculative_decoding"] for root in answer if root.get("metrics")]
    histogram = stats["acceptance_histogram"]
    assert isinstance(histogram, list)
    assert {type(count) for count in histogram} == {int}
    assert all(type(stats[name]) is float for name in FLOATS)
    assert all(type(stats[name]) is int for name in COUNTS)
    assert stats.get("num_spec_tokens") in (None, len(histogram) - 1)
    assert sum(histogram) == stats["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == stats["num_accepted_draft_tokens"]
    assert stats["num_accepted_draft_tokens"] <= stats["num_draft_tokens"]
    return stats


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_payload_with_the_names_that_aiperf_reads(served: Running, path: str, options: dict[str, Any]):
    drafted = "off" not in options.get("speculation", {})
    for answer in roots(served, path, BODIES[path] | options):
        stats = read(answer)
        steps = stats["num_spec_steps"]
        assert (steps > 0) == drafted
        accepted, offered = stats["num_accepted_draft_tokens"], stats["num_draft_tokens"]
        assert stats["mean_acceptance_length"] == pytest.approx(1 + accepted / steps if steps else 1.0)
        assert stats["draft_acceptance_rate"] == pytest.approx(accepted / offered if offered else 0.0)


def test_without_usage_each_choice_ends_with_its_own(served: Running):
    body = BODIES[TEXT] | {"n": 2, "stream": True}
    ends = [chunk for chunk in chunks_of(served, TEXT, body) if "metrics" in chunk]
    assert sorted(chunk["choices"][0]["index"] for chunk in ends) == [0, 1]
    assert all(chunk["choices"][0]["finish_reason"] for chunk in ends)
    for chunk in ends:
        read([chunk])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_aiperf_s_own_adapter_reads_a_live_answer(served: Running, path: str, options: dict[str, Any]):
    parser = pytest.importorskip("aiperf.records.inference_result_parser").InferenceResultParser
    models = pytest.importorskip("aiperf.common.models")
    endpoint = pytest.importorskip("aiperf.endpoints.base_endpoint").BaseEndpoint
    for answer in roots(served, path, BODIES[path] | options):
        parsed = [
            models.ParsedResponse(
                perf_ns=at,
                data=None,
                usage=root.get("usage"),
                spec_decode_stats=endpoint.extract_spec_decode_stats(root),
            )
            for at, root in enumerate(answer)
        ]
        record, stats = parser._extract_spec_decode_acceptance(parsed), read(answer)
        assert record is not None
        for name in FLOATS + COUNTS:
            assert getattr(record, name) == stats[name]
        assert record.completion_tokens == answer[-1]["usage"]["completion_tokens"]
        assert record.acceptance_histogram == {j: n for j, n in enumerate(stats["acceptance_histogram"]) if n}
