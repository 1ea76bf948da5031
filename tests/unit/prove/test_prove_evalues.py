"""E-values: how often they are wrong, what they see, and that each bet is fair."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from outrider.prove.evalues import (
    DRAFTED_ALTERNATIVES,
    FALSE_ALARM,
    LIKELY_ALTERNATIVES,
    REPLACED,
    RUNS,
    LawTest,
    LearntLaw,
    Simulator,
    drafted_payoffs,
    likely_payoffs,
    threshold,
)

LAW = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0], dtype=torch.float64)
DRAFT = torch.tensor([0.2, 0.2, 0.5, 0.05, 0.0, 0.05], dtype=torch.float64)
POSSIBLE = torch.arange(5)


@pytest.mark.parametrize("law", [LAW, torch.tensor([0.999, 0.001], dtype=torch.float64)])
def test_every_bet_on_likely_tokens_is_fair(law: Tensor):
    """The expectation of what it pays is 1 under the law: no more, and nothing is given away."""
    tokens = torch.nonzero(law)[:, 0]
    paid = likely_payoffs(law, tokens).exp()  # [tokens, alternatives]
    assert paid.shape[1] == LIKELY_ALTERNATIVES
    assert torch.allclose(law[tokens] @ paid, torch.ones(LIKELY_ALTERNATIVES, dtype=torch.float64), atol=1e-12)


def test_every_bet_on_drafted_tokens_is_at_most_fair():
    """At most, since the draft may have tokens that the law rules out."""
    paid = LAW[POSSIBLE] @ drafted_payoffs(LAW, DRAFT, POSSIBLE).exp()
    assert len(paid) == DRAFTED_ALTERNATIVES
    assert bool((paid <= 1 + 1e-12).all())
    shared = DRAFT * (LAW > 0) / DRAFT[LAW > 0].sum()
    assert torch.allclose(LAW[POSSIBLE] @ drafted_payoffs(LAW, shared, POSSIBLE).exp(), torch.ones(6).double())


def test_a_learnt_law_bets_what_it_saw():
    learnt = LearntLaw()
    token = torch.tensor([0])
    assert learnt.payoffs("a", LAW, token).exp().tolist() == [[1.0, 1.0, 1.0]]
    expected = [[(w * 0.5 + 1) / (w + 1) / 0.5 for w in (4, 32, 256)]]
    assert learnt.payoffs("a", LAW, token).exp().tolist() == [pytest.approx(expected[0])]
    assert learnt.payoffs("b", LAW, token).exp().tolist() == [[1.0, 1.0, 1.0]]


def test_a_token_that_the_law_rules_out_fails_at_once():
    test = LawTest(LIKELY_ALTERNATIVES)
    test.add(likely_payoffs(LAW, torch.tensor([5] * len(test.logs))), 0.5)
    assert test.log_e > threshold(1000)


def run(draws: int, seed: int, bias: float = 0.0) -> LawTest:
    """Draws from the law, a share of which is replaced by the likeliest token."""
    test, simulator, dice = LawTest(LIKELY_ALTERNATIVES), Simulator(seed), random.Random(seed)
    for _ in range(draws):
        honest = dice.choices(range(6), LAW.tolist())[0]
        drawn = simulator.draw(0 if dice.random() < bias else honest, LAW)
        test.add(likely_payoffs(LAW, drawn.tokens), drawn.distance)
    return test


def test_e_values_of_honest_draws_are_rarely_large():
    """Markov's bound, at a level that a test can reach: no more than 1 in 20 above 20, on average."""
    values = [math.exp(run(40, seed).log_e) for seed in range(60)]
    assert sum(value >= 20 for value in values) <= 60 * 0.05
    assert sum(values) / len(values) < 1.5


def test_the_stated_power_is_kept():
    """What the simulations say would show, does show in draws of that bias."""
    limit = threshold(10)
    honest = run(600, 1)
    assert honest.log_e < 0
    visible = honest.visible_bias(limit)
    assert visible is not None
    share = visible / (1 - float(LAW.max()))
    assert share in [pytest.approx(each) for each in REPLACED]
    assert all(run(600, seed, share).log_e > limit for seed in (2, 3))


def test_evidence_is_kept_in_the_journal_and_adds_up():
    one, other = run(50, 3), run(70, 4)
    sum_of_both = LawTest.from_dict(one.as_dict())
    sum_of_both.join(LawTest.from_dict(other.as_dict()))
    assert sum_of_both.draws == 120
    assert torch.allclose(sum_of_both.logs, one.logs + other.logs, atol=1e-5)
    assert len(one.logs) == 1 + len(REPLACED) * RUNS


def test_all_tests_together_keep_the_false_alarm_rate():
    assert sum(math.exp(-threshold(40)) for _ in range(40)) == pytest.approx(FALSE_ALARM)
