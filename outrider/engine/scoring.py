"""Scores a given text: the target's log-probabilities of its tokens, computed in pieces between rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count

from outrider.core.draft import Draft
from outrider.core.errors import ModelError
from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.runners.base import Runner
from outrider.verify.logprobs import token_logprobs

PIECE = 128  # tokens scored in one pass, so that a long text does not hold up the rounds of others
_ids = count(-1, -1)  # below the engine's own, which count up from 0


class Scoring:
    """One text on its way through the target. Call `step` until `done`, then `close`; between steps rounds may run.

    The text is handed over as a draft that is kept whole, since a draft gets logits at every token.
    """

    def __init__(self, target: Runner, tokens: Seq[Token], top: int, salt: str = "") -> None:
        self.target, self.tokens, self.top, self.salt = target, tuple(tokens), top, salt
        self.logprobs: list[TokenLogprob] = []
        """Of every token but the first, which nothing comes before."""
        self._id, self._cached, self._open = next(_ids), 0, False

    @property
    def done(self) -> bool:
        return len(self.logprobs) >= len(self.tokens) - 1

    def step(self) -> bool:
        """Score one piece. False: no page was free; try again when another text has ended."""
        pool = self.target.pool
        if not self._open:
            self._cached = pool.open(self._id, (), self.salt)  # shared pages would bring no logits
            self._open = True
        piece = self.tokens[self._cached : min(self._cached + PIECE, len(self.tokens) - 1)]  # nothing follows the last
        if not pool.reserve(self._id, self._cached + len(piece)):
            return False
        span = Span(self._id, self._cached, piece[:1], Draft(piece[1:]))
        logits = self.target.score([span]).logits
        first = len(self.logprobs) - self._cached  # where the cache could not keep a piece, it is read again
        said = self.tokens[len(self.logprobs) + 1 : self._cached + len(piece) + 1]
        found = token_logprobs(logits[first : first + len(said)], list(said), self.top)
        if any(each.logprob != each.logprob for each in found):
            raise ModelError("the model's scores of this text are NaN or infinite; try another text")
        self.logprobs += found
        self._cached = self.target.keep(span, range(len(piece) - 1))
        return True

    def close(self) -> None:
        """Give the pages back. Called once, however far it got."""
        if self._open:
            self.target.release(self._id)
            self._open = False
