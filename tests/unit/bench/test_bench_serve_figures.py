"""A server's figures, against vLLM's and aiperf's definitions written out with numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.bench.client import Outcome, read_stream
from outrider.bench.load import Load, arrivals
from outrider.bench.serve_figures import aiperf_records, prefix_hit_rate, spec_decode, vllm_result

SPEC = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [1, 1, 0, 2],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 7,
    "num_draft_tokens": 12,
}
VLLM_NAMES = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "input_lens"),
    *("output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts", "errors"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "spec_decode_acceptance_rate"),
    *("spec_decode_acceptance_length", "spec_decode_num_drafts", "spec_decode_draft_tokens"),
    *("spec_decode_accepted_tokens", "spec_decode_per_position_acceptance_rates"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}
"""What vLLM 0.32's `vllm bench serve --save-result --save-detailed` writes for a generating model."""


def outcome(began: float, pieces: list[float], ended: float, tokens: int, **more) -> Outcome:
    """Times after a second 100."""
    times = [100 + began + each for each in pieces]
    return Outcome("p", 0, 100 + began, 10**18, 0.0, times, 100 + ended, "text", 10, tokens, **more)


OUTCOMES = [
    outcome(0.0, [0.5, 0.7, 1.4], 1.5, 9, cached_tokens=4, spec=SPEC),
    outcome(0.25, [0.25], 1.0, 1, cached_tokens=0, spec=SPEC),
    outcome(1.0, [0.1, 0.2], 2.2, 5, cached_tokens=8),
    outcome(1.0, [], 1.1, 0, error="too long", status=400),
]


def test_names_and_values_are_vllm_s():
    found = vllm_result(OUTCOMES, 2.5, Load(concurrency=2), "m", "outrider")
    assert found.keys() == VLLM_NAMES
    assert (found["completed"], found["failed"], found["num_prompts"]) == (3, 1, 4)
    assert (found["request_rate"], found["max_concurrency"]) == ("inf", 2)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 15)
    assert found["output_throughput"] == 15 / 2.5
    assert found["total_token_throughput"] == 45 / 2.5
    assert found["max_concurrent_requests"] == 2  # the third begins when the second ends
    assert found["max_output_tokens_per_s"] == 3  # 0.5, 0.5, 0.7; then 1.1, 1.2, 1.4
    expected = {
        "ttft": [0.5, 0.25, 0.1],
        "tpot": [(1.5 - 0.5) / 8, (1.2 - 0.1) / 4],
        "itl": [0.2, 0.7, 0.1],
        "e2el": [1.5, 0.75, 1.2],
    }
    for name, values in expected.items():
        assert found[f"mean_{name}_ms"] == pytest.approx(1e3 * np.mean(values))
        assert found[f"median_{name}_ms"] == pytest.approx(1e3 * np.median(values))
        assert found[f"std_{name}_ms"] == pytest.approx(1e3 * np.std(values))
        assert found[f"p99_{name}_ms"] == pytest.approx(1e3 * np.percentile(values, 99))
    json.dumps(found, allow_nan=False)
    assert vllm_result(OUTCOMES, 2.5, Load(rate=4.0), "m", "x")["request_rate"] == 4.0


def test_speculation_is_summed_over_requests():
    found = spec_decode(OUTCOMES)
    assert found["spec_decode_num_drafts"] == 8
    assert found["spec_decode_acceptance_rate"] == pytest.approx(100 * 14 / 24)
    assert found["spec_decode_acceptance_length"] == pytest.approx(1 + 14 / 8)
    # of four drafts, three accepted one token or more, two of them three
    assert found["spec_decode_per_position_acceptance_rates"] == [3 / 4, 2 / 4, 2 / 4]
    assert spec_decode(OUTCOMES[2:3]) == {}


def test_cache_hits_are_of_those_who_tell():
    assert prefix_hit_rate(OUTCOMES) == pytest.approx((4 + 0 + 8) / 30)
    assert prefix_hit_rate([outcome(0, [0.1], 0.2, 3)]) is None


def test_records_are_aiperf_s():
    first, _, third, failed = aiperf_records(OUTCOMES, "vllm")
    assert first["metadata"]["request_end_ns"] - first["metadata"]["request_start_ns"] == 1_500_000_000
    assert first["metrics"]["inter_chunk_latency"]["value"] == pytest.approx([200, 700])
    assert first["metrics"]["inter_token_latency"] == {"value": pytest.approx(125), "unit": "ms"}
    assert first["metrics"]["output_token_throughput_per_user"]["value"] == pytest.approx(8)
    assert first["spec_decode_acceptance"]["acceptance_histogram"] == {"0": 1, "1": 1, "3": 2}
    assert "spec_decode_acceptance" not in third
    assert (failed["metrics"], failed["error"]["code"]) == ({}, 400)


def test_arrivals_are_a_poisson_process():
    times = arrivals(4.0, 20_000, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.03)  # of an exponential law, its mean
    assert times == arrivals(4.0, 20_000, seed=1)


def test_streams_are_read_as_servers_write_them():
    lines = [
        b": comment\n",
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n',
        b"\n",
        b'data: {"choices": [{"delta": {"reasoning_content": "Hm. "}}]}\n',
        b'data:{"choices": [{"delta": {"content": "Yes"}}], "usage": null}\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n',
        b"data: [DONE]\n",
    ]
    found = Outcome("p", 0)
    read_stream(lines, found)
    assert (found.text, len(found.pieces)) == ("Hm. Yes", 2)
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (7, 5, None)
    untold = Outcome("p", 0)
    read_stream([*lines[:5], lines[6]], untold)
    assert untold.output_tokens == 2
    for bad in (lines[:-1], [b'data: {"error": {"message": "full"}}\n']):
        with pytest.raises(ValueError, match=r"ended early|full"):
            read_stream(bad, Outcome("p", 0))
