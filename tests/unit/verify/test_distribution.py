"""Mode `distribution`: the parts of the rules, their draws, and drafts that break their contract."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import NO_TOKEN, SamplingParams
from outrider.core.sequence import Sequence
from outrider.verify.base import Rule, make_verifier
from outrider.verify.chain_rules import accept_probability, block_weights, residual, stated_probs
from outrider.verify.draft_sampling import draft_token, draft_top
from outrider.verify.rng import RoundRng
from outrider.verify.tree_rule import after_rejection, remaining_probs

P = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.5, 0.1], dtype=torch.float64)
SAMPLED = SamplingParams(temperature=1.0)
RULES = pytest.mark.parametrize("rule", ["block", "token"])


def seq(params: SamplingParams = SAMPLED, seed: int = 0) -> Sequence:
    return Sequence(0, [1, 2], 2, params, seed)


def test_accept_probability_and_residual_by_hand():
    assert [accept_probability(P, Q, t) for t in range(4)] == pytest.approx([1.0, 1.0, 0.4, 0.0])
    assert residual(P, Q).tolist() == pytest.approx([0.3, 0.1, 0.0, 0.0])
    assert torch.equal(residual(P, P), P)  # only rounding can reject here
    assert accept_probability(P, torch.zeros(4), 0) == 0.0  # a draft that gives its own token probability 0
    assert accept_probability(P, Q, 4) == accept_probability(P, Q, -1) == 0.0  # outside the vocabulary


def test_block_weights_by_hand():
    """The published formulas, worked for two tokens."""
    p, q = torch.stack([P, P, P]), torch.stack([Q, Q])
    weights, chances = block_weights([2, 0], p, q)
    assert weights == pytest.approx([1.0, 0.4, 1.0])  # 0.2 / 0.5, then 0.4 * 0.5 / 0.2
    excess = max(0, 0.4 * 0.5 - 0.2) + max(0, 0.4 * 0.3 - 0.2) + max(0, 0.4 * 0.2 - 0.5)
    assert chances[1:] == pytest.approx([excess / (excess + 0.6), 1.0])


def test_what_is_left_after_rejections():
    assert remaining_probs(Q, [2]).tolist() == pytest.approx([0.4, 0.4, 0.0, 0.2])
    assert remaining_probs(Q, [0, 1, 2, 3]).tolist() == [0.0] * 4
    assert after_rejection(P, Q).tolist() == pytest.approx([0.75, 0.25, 0.0, 0.0])


def test_stated_probs():
    assert stated_probs(Draft((2, 9)), P[None]).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]  # 9 is no token here
    broken = Draft((1, 0), probs=torch.tensor([[math.nan, 2.0, -1.0], [math.inf, 1.0, 3.0]]))
    assert stated_probs(broken, P[None]).tolist() == [[0, 1, 0, 0], [0, 0.25, 0.75, 0]]


def test_draws_repeat_for_a_seed_and_differ_between_rounds():
    def answers(s: Sequence) -> list[int]:
        rng = RoundRng(s)
        return [rng.bernoulli(0.5) for _ in range(40)] + [rng.categorical(P) for _ in range(40)]

    longer = Sequence(0, [1, 2, 3], 2, SAMPLED, 0)
    assert answers(seq()) == answers(seq())
    assert answers(seq()) != answers(longer)
    assert answers(seq()) != answers(seq(seed=1))


def test_a_token_without_weight_is_never_drawn():
    weights = torch.tensor([0.0, 0.0, 1e-300, 0.0, 3e-300, 0.0], dtype=torch.float64)
    rng = RoundRng(seq())
    assert {rng.categorical(weights) for _ in range(200)} == {2, 4}
    assert rng.categorical(torch.zeros(3)) == NO_TOKEN
    assert rng.categorical(torch.full((3,), math.nan)) == NO_TOKEN
    assert not any(rng.bernoulli(0.0) for _ in range(200))
    assert all(rng.bernoulli(1.0) for _ in range(200))


@RULES
def test_the_same_seed_and_draft_give_the_same_verdict(rule: Rule):
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    draft = Draft((1, 2, 3), probs=torch.full((3, 6), 1 / 6))
    verdicts = {s: make_verifier("distribution", rule).judge([seq(seed=s)], [draft], logits)[0] for s in range(40)}
    for s, verdict in verdicts.items():
        assert make_verifier("distribution", rule).judge([seq(seed=s)], [draft], logits)[0] == verdict
    assert len({v.tokens for v in verdicts.values() if isinstance(v, Verdict)}) > 3


@RULES
@pytest.mark.parametrize("shape", [None, (-1, -1, 0)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "probs",
    [
        None,
        torch.full((3, 6), math.nan),
        torch.zeros(3, 6),
        torch.full((3, 6), math.inf),
        -torch.ones(3, 6),
        torch.full((3, 9), 1 / 9),  # a draft model with more tokens than the target
        torch.full((3, 2), 1 / 2),  # and one with fewer
    ],
    ids=["none", "nan", "zero", "inf", "negative", "wide", "narrow"],
)
def test_whatever_a_draft_states_every_token_is_the_targets(rule: Rule, shape: tuple[int, ...] | None, probs: Tensor):
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for tokens in ((0, 1, 5), (8, 7, 6), (-1, -2, -3)):
        draft = Draft(tokens, parents=shape, probs=probs)
        for s in range(20):
            (verdict,) = make_verifier("distribution", rule).judge([seq(seed=s)], [draft], logits)
            assert isinstance(verdict, Verdict)
            assert all(0 <= token < 6 for token in verdict.tokens)


@RULES
def test_a_draft_model_with_more_tokens_than_the_target_keeps_its_distribution(rule: Rule):
    """Token 3 exists for the draft alone: rejecting it must not favour any other."""
    logits = P[:3].log().expand(2, -1)
    counts = torch.zeros(3)
    for s in range(4000):
        token = [0, 0, 1, 1, 2, 2, 2, 2, 2, 3][s % 10]  # as often as Q says
        draft = Draft((token,), probs=Q[None])
        (verdict,) = make_verifier("distribution", rule).judge([seq(seed=s)], [draft], logits)
        assert isinstance(verdict, Verdict)
        counts[verdict.tokens[0]] += 1
    assert (counts / 4000).tolist() == pytest.approx(P[:3].tolist(), abs=5 * 0.5 / math.sqrt(4000))


def test_draft_token_states_the_probabilities_it_drew_from():
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.5, top_k=3)
    seqs = [seq(SAMPLED), seq(params), seq(SamplingParams())]
    tokens, probs = draft_token(logits, seqs, [(), (4,), ()], "distribution")
    assert probs is not None
    torch.testing.assert_close(probs[0], logits[0].double().softmax(-1), rtol=0, atol=1e-7)
    assert int((probs[1] > 0).sum()) == 3
    assert probs[2].nonzero().tolist() == [[int(logits[2].argmax())]]
    assert all(probs[r, token] > 0 for r, token in enumerate(tokens))
    assert draft_token(logits, [seq(SamplingParams())] * 3, [()] * 3, "distribution") == (
        logits.argmax(-1).tolist(),
        None,
    )


def test_draft_token_draws_from_its_probabilities():
    draws = 20_000
    seqs = [seq(seed=s) for s in range(draws)]
    tokens, _ = draft_token(Q.log().expand(draws, -1), seqs, [(1,)] * draws, "distribution")
    share = torch.bincount(torch.tensor(tokens), minlength=4) / draws
    assert share.tolist() == pytest.approx(Q.tolist(), abs=5 * 0.5 / math.sqrt(draws))


def test_draft_top_draws_without_replacement_in_order():
    draws = 4000
    pairs = torch.zeros(4, 4)
    for s in range(draws):
        (a, b), probs = draft_top(Q.log(), seq(seed=s), (), 2, "distribution")
        pairs[a, b] += 1
        assert probs is not None
        assert torch.allclose(probs, Q, rtol=0, atol=1e-15)
    wanted = Q[:, None] * Q[None] / (1 - Q[:, None])
    wanted.fill_diagonal_(0)
    assert float((pairs / draws - wanted).abs().max()) < 5 * 0.5 / math.sqrt(draws)
    assert bool((pairs.diagonal() == 0).all())


def test_draft_top_has_no_more_tokens_than_have_probability():
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0])
    narrow = SamplingParams(temperature=1.0, top_k=2)
    for mode in ("seeded", "distribution"):
        tokens, _ = draft_top(logits, seq(narrow), (), 3, mode)
        assert sorted(tokens) == [0, 2]
        assert draft_top(logits, seq(SamplingParams()), (), 9, mode) == ([0, 2, 1, 3], None)
        assert draft_top(logits, seq(), (), 0, mode)[0] == []


def test_a_draft_model_whose_logits_are_broken_still_drafts():
    broken = torch.full((1, 6), math.nan)
    assert draft_token(broken, [seq()], [()], "seeded") == ([0], None)
    tokens, probs = draft_token(broken, [seq()], [()], "distribution")
    assert tokens == [0]
    assert probs is not None
    assert probs.tolist() == [[1.0, 0, 0, 0, 0, 0]]
    assert draft_top(broken[0], seq(), (), 2, "seeded") == ([], None)
