"""Mode `distribution`, for a tree: descend to a child, or replace them all, so that the text follows p.

Siblings were drawn without replacement from their parent's law, in order (Sequoia, Chen et al.
2024; recursive rejection). A refused child leaves the target's law without what the draft's
accounts for, and the draft's law without that child. A tree that states no laws was certain of
each child: then a child stands with just the probability the target gives it.
"""

from __future__ import annotations

from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.sampling import Token
from outrider.verify.chain import acceptance, residual
from outrider.verify.dice import Dice


def tree_rule(draft: Draft, p: Tensor, q: Tensor, dice: Dice) -> tuple[tuple[int, ...], Token]:
    """The nodes that stand, from the first guess down, and the token that follows them.

    p [n + 1, vocab]: the target's laws after the text and after each node. q [n, vocab]: for
    each node, the law at its parent before any sibling was drawn.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        left = p[node + 1]  # [vocab]
        nothing = bool(left[0].isnan())
        child, left = (None, left) if nothing else _first_kept(draft, draft.children(node), left, q, dice)
        if child is None:
            return tuple(path), dice.draw(left)
        path.append(child)


def _first_kept(draft: Draft, children: list[int], left: Tensor, q: Tensor, dice: Dice) -> tuple[int | None, Tensor]:
    """The first child that stands, and the target's law less what the refused ones accounted for."""
    drawn: list[Token] = []
    for child in children:
        stated = remaining(q[child], drawn) if draft.probs is not None else q[child]
        if dice.chance(acceptance(left, stated, draft.tokens[child])):
            return child, left
        left = after_refusal(left, stated)
        drawn.append(draft.tokens[child])
    return None, left


def remaining(q: Tensor, drawn: list[Token]) -> Tensor:
    """The law q [vocab] once `drawn` are gone; all zero where nothing else was possible."""
    if not drawn:
        return q
    q = q.clone()
    q[[token for token in drawn if 0 <= token < len(q)]] = 0.0
    mass = q.sum()
    return q / mass if bool(mass > 0) else q


def after_refusal(p: Tensor, q: Tensor) -> Tensor:
    """The target's law [vocab] given that a draw from q was refused."""
    left = residual(p, q)
    return left / left.sum()
