"""Mode `distribution`: a greedy request beside a sampled one, drafted by a model for different numbers of tokens."""

from __future__ import annotations

import pytest
from plain_decoding import assert_same, request, run
from toy_world import TOY


@pytest.mark.parametrize("options", ["k=2", "k=4", "k=4,min_prob=0.3"])
def test_a_greedy_text_is_drafted_as_alone_with_sampled_ones(options: str):
    """Where only greedy texts are left to draft for, no probabilities are stated, for none of its tokens."""
    greedy = request([1], max_tokens=30, ignore_eos=True)
    sampled = [request([i + 1], max_tokens=3 + 4 * i, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    tried = TOY.engine(f"draft-model:model=draft,{options}", mode="distribution")
    told = run(tried, [greedy, *sampled])
    assert_same(told[0], TOY.judged(greedy))
    assert tried.stats.all.accepted > 0
