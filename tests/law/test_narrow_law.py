"""A draft that cannot say every token, enumerated: whatever it leaves out, the target's law is what is told."""

from __future__ import annotations

import pytest
import torch
from law_harness import Branching, Model, Shape, chains, distance, emitted, joint, request, trees
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import SamplingParams, Token
from outrider.verify.base import RULES
from outrider.verify.distribution import decide
from outrider.verify.propose import draft_token

VOCAB, LENGTH, EXACT = 4, 3, 1e-12
OPTIONS = {
    "plain": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=1.3, top_k=2),
    "top-p": SamplingParams(temperature=0.7, top_p=0.8),
}
LEFT_OUT = [(3,), (0, 2), (0, 1, 2)]
FORK: Shape = (((), ()), ())


class Narrow(Model):
    """Says nothing of some tokens: their logits are -inf, as `ReducedHead` has them."""

    def __init__(self, seed: int, left_out: tuple[Token, ...]) -> None:
        super().__init__(seed, vocab=VOCAB)
        self.left_out = list(left_out)

    def logits(self, context: tuple[Token, ...]) -> Tensor:
        return super().logits(context).index_fill(0, torch.tensor(self.left_out), -torch.inf)


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("rule", [*RULES, "tree"])
def test_whatever_a_draft_leaves_out_the_targets_law_is_told(
    rule: str, params: SamplingParams, left_out: tuple[Token, ...]
):
    target = Model(4, vocab=VOCAB)
    draft = Narrow(9, left_out)

    def judge(drawn: Draft, dice: Branching) -> Verdict:
        return decide(request(params), drawn, target.score(drawn), RULES.get(rule, RULES["block"]), dice)

    drafts = trees(draft, params, FORK) if rule == "tree" else chains(draft, params, LENGTH - 1)
    law, _ = emitted(target, params, drafts, judge, LENGTH)
    assert distance(law, joint(target, params, LENGTH)) <= EXACT


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_law_a_draft_states_is_normal_and_holds_nothing_it_cannot_say(
    params: SamplingParams, left_out: tuple[Token, ...]
):
    """Production's stated law against the one the enumeration above draws from."""
    draft = Narrow(9, left_out)
    for context in ((), (1,), (3, 0)):
        seq = request(params, tokens=context, seed=5)
        (token,), stated = draft_token(draft.logits(context)[None], [seq], [()], "distribution")
        assert stated is not None
        assert token not in left_out
        assert float(stated.sum()) == pytest.approx(1, abs=EXACT)
        assert stated[0].tolist() == pytest.approx(draft.law(context, params), abs=EXACT)
