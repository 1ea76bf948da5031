"""Mode `distribution`, trees: accept a path of the tree so that the text follows the target's distribution.

Siblings were drawn without replacement from their parent's probabilities, in order (Sequoia, Chen et al. 2024;
recursive rejection). After a rejection the target's probabilities become the residual (p - q)+, and the rejected token
is removed from the draft's; both are normalised again. In a tree without probabilities every child counts as certain:
it is accepted with the probability the target gives it.
"""

from __future__ import annotations

from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.sampling import Token
from outrider.verify.chain_rules import accept_probability, residual
from outrider.verify.rng import Rng


def tree_rule(draft: Draft, p: Tensor, q: Tensor, rng: Rng) -> tuple[tuple[int, ...], Token]:
    """The accepted nodes, from the first level down, and the token that follows them.

    p [n + 1, vocab]: the target's probabilities after the text and after each node. q [n, vocab]:
    for each node, the draft's probabilities at its parent before any sibling was drawn.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        left = p[node + 1]  # [vocab]
        nothing = bool(left[0].isnan())
        child, left = (None, left) if nothing else _first_accepted(draft, draft.children(node), left, q, rng)
        if child is None:
            return tuple(path), rng.categorical(left)
        path.append(child)


def _first_accepted(draft: Draft, children: list[int], left: Tensor, q: Tensor, rng: Rng) -> tuple[int | None, Tensor]:
    """The first accepted child, and the target's probabilities after the rejections before it."""
    drawn: list[Token] = []
    for child in children:
        stated = remaining_probs(q[child], drawn) if draft.probs is not None else q[child]
        if rng.bernoulli(accept_probability(left, stated, draft.tokens[child])):
            return child, left
        left = after_rejection(left, stated)
        drawn.append(draft.tokens[child])
    return None, left


def remaining_probs(q: Tensor, drawn: list[Token]) -> Tensor:
    """q [vocab] without the tokens `drawn`, normalised; all zero where no other token has probability."""
    if not drawn:
        return q
    q = q.clone()
    q[[token for token in drawn if 0 <= token < len(q)]] = 0.0
    mass = q.sum()
    return q / mass if bool(mass > 0) else q


def after_rejection(p: Tensor, q: Tensor) -> Tensor:
    """The target's probabilities [vocab] given that a draw from q was rejected."""
    left = residual(p, q)
    return left / left.sum()
