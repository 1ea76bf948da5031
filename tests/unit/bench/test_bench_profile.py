"""The profile of a round: arithmetic on made-up pieces, and operators named on the CPU."""

from __future__ import annotations

import json

import pytest

from outrider.bench.llm_factory import LLMFactory
from outrider.bench.profile import Gap, TimeSpan, busy_us, costs_of, gaps_of, profile_rounds
from outrider.core.sampling import SamplingParams
from outrider.testing.synthetic import synthetic_pair

PIECES = [
    TimeSpan("a", 0, 10),
    TimeSpan("b", 5, 8),
    TimeSpan("a", 12, 15),
    TimeSpan("c", 15, 20),
    TimeSpan("d", 30, 31),
]


def test_busy_time_counts_overlaps_once():
    assert busy_us(PIECES) == 10 + 3 + 5 + 1
    assert busy_us([]) == 0


def test_gaps_lie_between_whatever_ended_last_and_the_next():
    assert gaps_of(PIECES) == [Gap(10, "c", "d"), Gap(2, "a", "a")]
    assert gaps_of(PIECES[:1]) == gaps_of([]) == []


def test_costs_are_summed_by_name_and_ranked():
    first, *rest = costs_of(PIECES, rounds=2)
    assert (first.name, first.count, first.us) == ("a", 1.0, 6.5)
    assert [cost.name for cost in rest] == ["c", "b", "d"]
    assert sum(cost.share for cost in (first, *rest)) == pytest.approx(1)


def test_the_profile_on_the_cpu_names_operators():
    llm = LLMFactory(synthetic_pair("tiny"), cache_tokens=512, context=256).llm("none", max_batch=2)
    for prompt in ([300, 301, 302], [400, 401]):
        llm.engine.submit(llm.request(prompt, SamplingParams(max_tokens=100, ignore_eos=True)))
    llm.engine.step()
    found = profile_rounds(llm.engine, 4)
    costs = {cost.name: cost for cost in found.costs}
    # four layers of four products each, and the head: 17 matrix products a round
    assert costs["aten::mm"].count == 17
    assert costs["aten::mm"].us > 0
    assert (found.device, found.rounds, found.tokens) == ("cpu", 4, 2.0)
    assert 0 < found.busy_ms <= found.profiled_ms
    assert found.gaps == found.copies == found.calls == []
    assert json.loads(json.dumps(found.as_dict()))["costs"][0]["name"] == found.costs[0].name
