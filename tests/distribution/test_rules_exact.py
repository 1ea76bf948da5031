"""The rules of mode `distribution`, enumerated: the production code over every draft and every draw, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import pytest
import torch
from distribution_harness import (
    VOCAB,
    Context,
    EnumeratedRng,
    Joint,
    Model,
    Shape,
    chains,
    distance,
    emitted,
    joint,
    outcomes,
    request,
    trees,
)

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import SamplingParams
from outrider.verify import chain_rules
from outrider.verify.base import RULES
from outrider.verify.distribution import judge_draft

Drafts = Iterable[tuple[float, Draft]]

EXACT = 1e-12
LENGTH = 4  # three draft tokens and the target's own token
PLAIN = SamplingParams(temperature=1.0)
OPTIONS = {
    "plain": PLAIN,
    "cool": SamplingParams(temperature=0.5),
    "top-k": SamplingParams(temperature=1.3, top_k=2),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=2, top_p=0.8),
}
PAIRS = [(Model(2 * i), Model(2 * i + 1)) for i in range(20)]
TREES: dict[str, Shape] = {
    "chain": ((((),),),),
    "fork": (((), ()), ((), ())),
    "every token": ((), (), ()),
    "uneven, three deep": ((((),), ()), ((),)),
}

both_rules = pytest.mark.parametrize("rule", RULES)
all_options = pytest.mark.parametrize("params", OPTIONS.values(), ids=OPTIONS.keys())
all_trees = pytest.mark.parametrize("shape", TREES.values(), ids=TREES.keys())


def run(target: Model, params: SamplingParams, drafts: Drafts, rule: str = "block") -> tuple[Joint, float]:
    """The distribution of the first tokens under production verification, and the expected tokens of a round."""

    def judge(draft: Draft, rng: EnumeratedRng) -> Verdict:
        return judge_draft(request(params), draft, target.score(draft), RULES[rule], rng)

    return emitted(target, params, drafts, judge, LENGTH)


def error(target: Model, params: SamplingParams, drafts: Drafts, rule: str = "block") -> float:
    return distance(run(target, params, drafts, rule)[0], joint(target, params, LENGTH))


def certain(drafts: Drafts) -> Iterator[tuple[float, Draft]]:
    """The same drafts, each stated as certain."""
    for _, draft in drafts:
        yield 1.0, Draft(draft.tokens, parents=draft.parents)


def best_first(model: Model, shape: Shape) -> Draft:
    """The tree of the model's most likely tokens, with the probabilities it would state had it drawn them."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[list[float]] = []
    todo: list[tuple[int, Context, Shape]] = [(-1, (), shape)]
    while todo:
        parent, context, children = todo.pop(0)
        row = model.probs(context, PLAIN)
        for token, below in zip(sorted(range(VOCAB), key=lambda t: -row[t]), children, strict=False):
            todo.append((len(tokens), (*context, token), below))
            tokens.append(token)
            parents.append(parent)
            probs.append(row)
    return Draft(tuple(tokens), parents=tuple(parents), probs=torch.tensor(probs, dtype=torch.float64))


def test_all_outcomes_are_enumerated():
    def draw(rng: EnumeratedRng) -> tuple[int, int]:
        first = rng.bernoulli(0.25)
        return int(first), rng.categorical(torch.tensor([1.0, 0.0, 3.0])) if first else int(rng.bernoulli(1.0))

    assert list(outcomes(draw)) == [(0.0625, (1, 0)), (0.1875, (1, 2)), (0.75, (0, 1))]
    with pytest.raises(ValueError, match=r"1\.5; it must be 0 to 1"):
        list(outcomes(lambda rng: rng.bernoulli(1.5)))


@both_rules
@all_options
def test_chains_drawn_from_any_distribution_keep_the_targets(rule: str, params: SamplingParams):
    for target, draft in PAIRS[:6]:
        assert error(target, params, chains(draft, params, 3), rule) <= EXACT


@both_rules
def test_a_draft_may_be_tempered_and_truncated_otherwise_than_the_target(rule: str):
    for target, draft in PAIRS[:3]:
        assert error(target, PLAIN, chains(draft, OPTIONS["top-k"], 3), rule) <= EXACT
        assert error(target, OPTIONS["top-k"], chains(draft, PLAIN, 3), rule) <= EXACT


@both_rules
def test_a_draft_from_the_targets_own_distribution_is_accepted_whole(rule: str):
    for target, _ in PAIRS[:3]:
        found, expected = run(target, PLAIN, chains(target, PLAIN, 3), rule)
        assert distance(found, joint(target, PLAIN, LENGTH)) <= EXACT
        assert expected == pytest.approx(4, abs=1e-12)


@both_rules
@all_options
def test_a_certain_chain_keeps_the_targets_distribution_whatever_it_holds(rule: str, params: SamplingParams):
    target, _ = PAIRS[0]
    for tokens in product(range(VOCAB), repeat=3):
        assert error(target, params, [(1.0, Draft(tokens))], rule) <= EXACT


@both_rules
def test_the_empty_draft_draws_from_the_targets_distribution(rule: str):
    assert error(PAIRS[0][0], OPTIONS["top-p"], [(1.0, Draft())], rule) <= EXACT


@all_trees
@all_options
def test_trees_drawn_without_replacement_keep_the_targets_distribution(shape: Shape, params: SamplingParams):
    for target, draft in PAIRS[:2]:
        assert error(target, params, trees(draft, params, shape)) <= EXACT


@all_trees
def test_certain_trees_keep_the_targets_distribution_whatever_they_hold(shape: Shape):
    target, draft = PAIRS[0]
    for chance, tree in list(certain(trees(draft, PLAIN, shape)))[::11]:
        assert error(target, PLAIN, [(chance, tree)]) <= EXACT


def test_a_tree_of_all_tokens_is_always_accepted():
    target, draft = PAIRS[0]
    _, drawn = run(target, PLAIN, trees(draft, PLAIN, TREES["every token"]))
    _, stated = run(target, PLAIN, [(1.0, Draft((2, 0, 1), parents=(-1, -1, -1)))])
    assert drawn == pytest.approx(2, abs=1e-12)
    assert stated == pytest.approx(2, abs=1e-12)


def test_the_block_rule_never_accepts_fewer_tokens_than_the_token_rule():
    gains = []
    for target, draft in PAIRS:
        drafts = list(chains(draft, PLAIN, 3))
        _, token = run(target, PLAIN, drafts, "token")
        _, block = run(target, PLAIN, drafts, "block")
        assert block >= token - 1e-12
        gains.append(block / token)
    assert sum(gains) / len(gains) > 1.02  # and more on average


def test_two_children_yield_more_tokens_than_one():
    """The point of a tree: a second child drawn without replacement only ever adds."""
    for target, draft in PAIRS[:8]:
        _, one = run(target, PLAIN, trees(draft, PLAIN, ((),)))
        _, two = run(target, PLAIN, trees(draft, PLAIN, ((), ())))
        assert two > one


# The same enumeration must catch rules that are wrong.


def test_top_k_tokens_passed_off_as_draws_are_caught():
    worst = max(error(target, PLAIN, [(1.0, best_first(draft, TREES["fork"]))]) for target, draft in PAIRS[:6])
    assert worst > 0.1


def test_dropping_a_drawn_token_for_its_own_small_probability_is_caught():
    def cut(drafts: Drafts) -> Iterator[tuple[float, Draft]]:
        for chance, draft in drafts:
            assert draft.probs is not None
            small = [i for i, token in enumerate(draft.tokens) if draft.probs[i, token] < 0.35]
            yield chance, draft.first_nodes(small[0]) if small else draft

    for rule in RULES:
        worst = max(error(target, PLAIN, cut(chains(draft, PLAIN, 3)), rule) for target, draft in PAIRS[:6])
        assert worst > 0.02


@both_rules
def test_replacing_a_rejected_token_from_p_itself_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chain_rules, "residual", lambda p, q: p)
    worst = max(error(target, PLAIN, chains(draft, PLAIN, 3), rule) for target, draft in PAIRS[:6])
    assert worst > 0.05


def test_children_tested_as_if_drawn_with_replacement_are_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outrider.verify.tree_rule.remaining_probs", lambda q, drawn: q)
    worst = max(error(target, PLAIN, trees(draft, PLAIN, TREES["fork"])) for target, draft in PAIRS[:3])
    assert worst > 0.01
