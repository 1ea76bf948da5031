"""What a draft model's cache holds of each text: what it has read, and the guesses of the last round behind it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.core.sampling import Token
from outrider.core.sequence import Sequence, Span
from outrider.runners.base import Runner

CHUNK = 512
"""Most tokens of a text read in one pass."""


class DraftCache:
    """Keeps a draft model's cache in step with texts that grow by any number of tokens.

    Guesses that turned out wrong are overwritten. A chain that was drafted on the device leaves
    all its guesses but the last in the cache; they may still be on their way to the host.
    """

    def __init__(self, model: Runner, vocab_size: int, guesses: int) -> None:
        """vocab_size: tokens that draft and target both know; guesses: most of them a round."""
        self.model, self.vocab_size, self.guesses = model, vocab_size, guesses
        self._held: dict[int, list[Token]] = {}
        self._ahead: dict[int, Seq[Token]] = {}
        """Guesses of the last round that are cached too, behind what is held."""
        self._behind: dict[int, Seq[Token]] = {}
        """Chains that follow a round in flight: where they begin is known once it lands."""

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._held

    def hold(self, seq: Sequence, budget: int) -> int:
        """Own pages for the text and as many guesses as there is room for; drop what turned out wrong.

        Returns how many guesses those are, at most `budget`, which is at least 1. Where it is 0 all that was held of
        the text is given up, so that others find room: there is nothing to draft.
        """
        held = self._held.get(seq.id)
        if held is not None and seq.id in self._ahead:
            held += self._ahead.pop(seq.id)
        if held is None:
            held = self._held[seq.id] = list(seq.tokens[: self.model.pool.open(seq.id, seq.tokens, seq.salt)])
        else:
            certain = max(0, len(held) - self.guesses)  # only guesses can be wrong, and they come last
            agree = certain + _common(held[certain:], seq.tokens[certain:])
            del held[min(len(seq.tokens) - 1, agree) :]
        known = max(seq.tokens[len(held) :]) < self.model.vocab_size  # the target may have more rows than the draft
        fits = min(budget, self._room(seq))
        if known and fits > 0 and self.reserve(seq, fits):
            return fits
        self.drop(seq)
        return 0

    def reserve(self, seq: Sequence, more: int) -> bool:
        """Own pages for the text and so many tokens more; False where there are none, or the context ends before."""
        return more <= self._room(seq) and self.model.pool.reserve(seq.id, len(seq.tokens) + more)

    def drop(self, seq: Sequence) -> None:
        """Give up all that is held of a text."""
        self._ahead.pop(seq.id, None)
        self._behind.pop(seq.id, None)
        if self._held.pop(seq.id, None) is not None:
            self.model.release(seq.id)

    def catch_up(self, seqs: Seq[Sequence]) -> None:
        """Read all but the last token of each text that lacks more than two: a chain on the device reads those."""
        seqs = [seq for seq in seqs if len(seq.tokens) - len(self._held[seq.id]) > 2]
        while seqs := [seq for seq in seqs if len(seq.tokens) - 1 > len(self._held[seq.id])]:
            pieces = [tuple(seq.tokens[len(self._held[seq.id]) : -1][:CHUNK]) for seq in seqs]
            self._read(
                [Span(s.id, len(self._held[s.id]), piece, wanted=False) for s, piece in zip(seqs, pieces, strict=True)]
            )

    def advance(self, work: list[tuple[Sequence, tuple[Token, ...]]]) -> torch.Tensor:
        """Read what each cache lacks of its text and guesses; logits after the last of them, [len(work), vocab]."""
        lacking = {seq.id: self._lacking(seq, guesses) for seq, guesses in work}
        while long := [i for i, tokens in lacking.items() if len(tokens) > CHUNK]:
            self._read([Span(i, len(self._held[i]), tuple(lacking[i][:CHUNK]), wanted=False) for i in long])
            for i in long:
                del lacking[i][:CHUNK]
        return self._read([Span(i, len(self._held[i]), tuple(tokens)) for i, tokens in lacking.items()])

    def score(self, spans: list[Span]) -> torch.Tensor:
        """The draft model's logits for the tokens both models know, [rows, vocab]; nothing is noted as read."""
        return self.model.score(spans)[:, : self.vocab_size]

    def chain(self, seq: Sequence, guesses: Seq[Token]) -> None:
        """Note a chain drafted on the device behind the text."""
        held = self._held[seq.id]
        held += seq.tokens[len(held) :]
        self._ahead[seq.id] = guesses[:-1]

    def has_chain(self, seq: Sequence) -> bool:
        """Whether such a chain stands behind the text as it is now."""
        return seq.id in self._ahead and len(self._held[seq.id]) == len(seq.tokens)

    def chain_behind(self, seq: Sequence, guesses: Seq[Token]) -> None:
        """Note a chain drafted behind what the round in flight will make of the text."""
        self._behind[seq.id] = guesses

    def land(self, seqs: Seq[Sequence]) -> None:
        """The round in flight is through: chains drafted behind it begin where the texts stand now."""
        for seq in seqs:
            if seq.id in self._behind:
                self.chain(seq, self._behind.pop(seq.id))

    def _room(self, seq: Sequence) -> int:
        """How many tokens more the context and the pages allow a text; negative where it is too long already."""
        pool = self.model.pool
        pages = len(pool.table(seq.id)) + pool.free
        return min(self.model.context, pages * pool.size) - len(seq.tokens)

    def _lacking(self, seq: Sequence, guesses: Seq[Token]) -> list[Token]:
        """What the cache lacks of a text and guesses behind it; of a long text no more is touched than that."""
        held = len(self._held[seq.id])
        return [*seq.tokens[held:], *guesses[max(0, held - len(seq.tokens)) :]]

    def _read(self, spans: list[Span]) -> torch.Tensor:
        logits = self.score(spans)
        for span in spans:
            self._held[span.seq_id] += span.tokens
        return logits


def _common(a: Seq[Token], b: Seq[Token]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
