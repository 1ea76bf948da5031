"""A drafter that knows each text in advance, and makes the drafts that are hardest for the engine.

They are blocks that are accepted whole, so that stops and limits fall inside them; blocks with a wrong token in the
middle; trees in which the right child comes after a wrong one, both with children; and drafts with a wrong first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits

NAME, K = "probe", 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """Drafts from known texts, found by the seeds of their sequences."""

    texts: Mapping[int, Seq[Token]]

    @property
    def traits(self) -> Traits:
        return Traits(name=NAME, max_tokens=K)

    def build(self, context: DrafterContext) -> Probe:
        return Probe(self, context.vocab_size)


class Probe(Drafter):
    """Drafts from known texts, with another kind of draft in each round."""

    def __init__(self, config: ProbeConfig, vocab_size: int) -> None:
        self.texts, self.vocab_size, self.traits = config.texts, vocab_size, config.traits

    def propose(self, view: RoundView) -> list[Draft]:
        return [self._draft(seq, budget) for seq, budget in zip(view.seqs, view.budgets, strict=True)]

    def _draft(self, seq: Sequence, budget: int) -> Draft:
        right = tuple(self.texts.get(seq.seed, ()))[seq.generated :]
        if not right or not budget:
            return EMPTY
        kind = seq.round % 4
        if kind == 0:
            tokens, parents = right[:budget], None
        elif kind == 1:
            tokens, parents = self._tree(right)
        elif kind == 2:
            cut = len(right) // 2 if len(right) < K else K // 2
            tokens, parents = (*right[:cut], self._other(right[cut]), *right[cut + 1 :]), None
        else:
            tokens, parents = (self._other(right[0]), *right), None
        return Draft(tokens, parents, source=NAME).first_nodes(budget)

    def _tree(self, right: tuple[Token, ...]) -> tuple[tuple[Token, ...], tuple[int, ...]]:
        """A tree of a wrong and the right next token, the right second token below either, and wrong tokens beside the
        right second and third ones."""
        a, b, c = (*right, *right[-1:] * 2)[:3]
        other = self._other
        tokens = (other(a), a, b, other(b), b, c, other(c))
        return tokens, (-1, -1, 0, 1, 1, 4, 4)

    def _other(self, token: Token) -> Token:
        """Any other token."""
        return (token + 1) % self.vocab_size
