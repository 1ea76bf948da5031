"""A drafter that cannot produce every token, enumerated: the text still follows the target's distribution."""

from __future__ import annotations

import pytest
import torch
from distribution_harness import EnumeratedRng, Model, Shape, chains, distance, emitted, joint, request, trees
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import SamplingParams, Token
from outrider.verify.base import RULES
from outrider.verify.distribution import judge_draft
from outrider.verify.draft_sampling import draft_token

VOCAB, LENGTH, EXACT = 4, 3, 1e-12
OPTIONS = {
    "plain": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=1.3, top_k=2),
    "top-p": SamplingParams(temperature=0.7, top_p=0.8),
}
LEFT_OUT = [(3,), (0, 2), (0, 1, 2)]
FORK: Shape = (((), ()), ())


class Reduced(Model):
    """Cannot produce some tokens: their logits are -inf, as `ReducedHead` has them."""

    def __init__(self, seed: int, left_out: tuple[Token, ...]) -> None:
        super().__init__(seed, vocab=VOCAB)
        self.left_out = list(left_out)

    def logits(self, context: tuple[Token, ...]) -> Tensor:
        return super().logits(context).index_fill(0, torch.tensor(self.left_out), -torch.inf)


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("rule", [*RULES, "tree"])
def test_whatever_a_draft_leaves_out_the_text_follows_the_target(
    rule: str, params: SamplingParams, left_out: tuple[Token, ...]
):
    target = Model(4, vocab=VOCAB)
    draft = Reduced(9, left_out)

    def judge(drawn: Draft, rng: EnumeratedRng) -> Verdict:
        return judge_draft(request(params), drawn, target.score(drawn), RULES.get(rule, RULES["block"]), rng)

    drafts = trees(draft, params, FORK) if rule == "tree" else chains(draft, params, LENGTH - 1)
    found, _ = emitted(target, params, drafts, judge, LENGTH)
    assert distance(found, joint(target, params, LENGTH)) <= EXACT


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_probabilities_a_draft_states_sum_to_1_and_are_0_for_what_it_leaves_out(
    params: SamplingParams, left_out: tuple[Token, ...]
):
    """Production's stated probabilities against those the enumeration above draws from."""
    draft = Reduced(9, left_out)
    for context in ((), (1,), (3, 0)):
        seq = request(params, tokens=context, seed=5)
        (token,), stated = draft_token(draft.logits(context)[None], [seq], [()], "distribution")
        assert stated is not None
        assert token not in left_out
        assert float(stated.sum()) == pytest.approx(1, abs=EXACT)
        assert stated[0].tolist() == pytest.approx(draft.probs(context, params), abs=EXACT)
