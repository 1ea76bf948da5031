"""The sizes of EAGLE's trees, which nodes are kept, and how children are chosen."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from outrider.drafters.eagle_tree import _best_nodes, drawn_plan, ranked_plan
from outrider.verify.head_sampling import HeadLogits, drawn_children, next_tokens, noisy_children
from outrider.verify.noise import DRAFT, gumbel, round_seed


@pytest.mark.parametrize("nodes", [1, 2, 5, 24, 31])
@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
def test_no_tree_is_larger_than_asked_for(nodes, depth, top_k):
    ranked, drawn = ranked_plan(nodes, depth, top_k), drawn_plan(nodes, depth, top_k)
    assert ranked.nodes == min(nodes, top_k + (depth - 1) * top_k**2)
    assert ranked.rows == 1 + (depth - 1) * top_k
    assert 1 <= drawn.nodes == sum(a * b for a, b in drawn.levels) <= nodes
    assert len(drawn.levels) == min(depth, nodes)
    for (above, each), (expanded, children) in pairwise(drawn.levels):
        assert 1 <= expanded <= above * each
        assert children <= 2


def test_a_node_that_is_as_likely_as_its_child_comes_first():
    tokens = torch.arange(6)[None]
    parents = torch.tensor([[-1, -1, 0, 0, 2, 2]])
    totals = torch.tensor([[-1.0, -2.0, -1.0, -3.0, -1.0, -2.0]], dtype=torch.float64)
    kept = _best_nodes(tokens, parents, totals, 5)
    assert kept.tokens.tolist() == [[0, 2, 4, 1, 5]]
    assert kept.parents is not None
    assert kept.parents.tolist() == [[-1, 0, 1, -1, 1]]


def logits(temperature: float, tokens: torch.Tensor | None = None) -> HeadLogits:
    rows = torch.randn(2, 3, 30 if tokens is None else len(tokens), generator=torch.Generator().manual_seed(7))
    texts = torch.tensor([9, 14]), torch.tensor([5, -6])
    return HeadLogits(rows, 2, *texts, torch.tensor([temperature, 0.0], dtype=torch.float64), 30, tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tokens", [None, torch.arange(0, 30, 3)], ids=["whole", "reduced"])
def test_children_are_the_top_of_log_q_and_the_targets_noise(temperature, tokens):
    given = logits(temperature, tokens)
    made = noisy_children(given, 4)
    ids = torch.arange(30) if tokens is None else tokens
    for row in range(3):
        scores = given.rows[0, row].double() / (temperature or 1.0)
        if temperature:
            scores = scores + gumbel(5, 9 + 2, 30)[ids]
        best = scores.log_softmax(-1).topk(4)
        assert made.tokens[0, row].tolist() == ids[best.indices].tolist()
        torch.testing.assert_close(made.scores[0, row], best.values)
        assert made.tokens[1, row].tolist() == ids[given.rows[1, row].topk(4).indices].tolist()
    one = given._replace(rows=given.rows[:, :1])
    assert next_tokens(one).tolist() == made.tokens[:, 0, 0].tolist()


def test_draws_state_what_they_were_drawn_from():
    ids = torch.arange(0, 30, 3)
    given = logits(0.7, ids)
    made = drawn_children(given, 3)
    assert made.probs is not None
    q = (given.rows[0].double() / 0.7).softmax(-1)
    torch.testing.assert_close(made.probs[0][:, ids], q)
    torch.testing.assert_close(made.probs.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    noise = gumbel(round_seed(5, 9), 9 + 2, 30, stream=DRAFT)[ids]
    assert made.tokens[0].tolist() == ids[(q.log() + noise).topk(3).indices].tolist()
    torch.testing.assert_close(made.scores[0], made.probs[0].gather(-1, made.tokens[0]).log())
