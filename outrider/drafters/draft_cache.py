"""What a draft model's cache holds of each text: the tokens that were read, and the last draft behind them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from outrider.core.sampling import Token
from outrider.core.sequence import Sequence, Span
from outrider.runners.base import Runner


class Text(Protocol):
    """A sequence, or a sequence's text in another model's tokens."""

    @property
    def id(self) -> int: ...
    @property
    def salt(self) -> str: ...
    @property
    def tokens(self) -> Seq[Token]: ...


class DraftCache:
    """Keeps a draft model's cache in step with texts that grow by any number of tokens.

    Rejected tokens are overwritten. A chain that was drafted on the device leaves all its tokens
    but the last in the cache; they may still be on their way to the host.
    """

    def __init__(self, model: Runner, target_vocab: int, max_draft: int) -> None:
        """max_draft: max tokens drafted for one text in a round."""
        self.model, self.max_draft = model, max_draft
        self.vocab_size = min(target_vocab, model.vocab_size)
        """Tokens that draft and target both know."""
        self._knows_all = model.vocab_size >= target_vocab
        self._cached: dict[int, list[Token]] = {}
        self._chains: dict[int, Seq[Token]] = {}
        """Tokens of the last chain that are cached behind those in `_cached`."""
        self._pending: dict[int, tuple[Seq[Token], int]] = {}
        """Chains drafted behind a round in flight, and the value of `Sequence.round` once that round completes: only
        then is it known where they begin."""

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._cached

    def make_room(self, seq: Text, budget: int) -> int:
        """Reserve pages for the text and as many drafted tokens as fit; drop what was rejected.

        Returns the number of tokens that fit, at most `budget`, which is at least 1. If none fit, all that is cached of
        the text is dropped so that others find room, and nothing can be drafted.
        """
        pool, cached = self.model.pool, self._cached.get(seq.id)
        if cached is None:
            cached = self._cached[seq.id] = [*seq.tokens[: pool.open(seq.id, seq.tokens, seq.salt)]]
        else:
            cached += self._chains.pop(seq.id, ())
            certain = max(0, len(cached) - self.max_draft)  # only drafted tokens can be wrong, and they come last
            agree = certain + _common(cached[certain:], seq.tokens[certain : len(cached)])
            del cached[min(len(seq.tokens) - 1, agree) :]
            pool.publish(seq.id, cached, min(len(cached), len(seq.tokens) - 2))  # a chain reads the last two again
        known = self._knows_all or max(seq.tokens[len(cached) :]) < self.model.vocab_size
        fits = min(budget, self._room(seq))
        if known and fits > 0 and self.reserve(seq, fits):
            return fits
        self.drop(seq)
        return 0

    def reserve(self, seq: Text, more: int) -> bool:
        """Reserve pages for the text and `more` tokens; False if there are too few, or the context ends before."""
        return more <= self._room(seq) and self.model.pool.reserve(seq.id, len(seq.tokens) + more)

    def drop(self, seq: Text) -> None:
        """Give up all that is cached of a text."""
        self._chains.pop(seq.id, None)
        self._pending.pop(seq.id, None)
        if self._cached.pop(seq.id, None) is not None:
            self.model.release(seq.id)

    def length(self, seq: Text) -> int:
        """The number of cached tokens; after `make_room` all of them are the text's."""
        return len(self._cached[seq.id])

    def read(self, work: Seq[tuple[Text, int]]) -> None:
        """Read the given number of further tokens of each text, in one pass."""
        spans: list[Span] = []
        for seq, count in work:
            start = len(self._cached[seq.id])
            if count > 0:
                spans.append(Span(seq.id, start, tuple(seq.tokens[start : start + count]), wanted=False))
        if spans:
            self._read(spans)

    def catch_up(self, seqs: Seq[Text], most: int = 2) -> None:
        """Read all but the last token of texts that lack more than `most`: a chain on the device reads the rest."""
        missing = [(seq, len(seq.tokens) - self.length(seq)) for seq in seqs]
        self.read([(seq, count - 1) for seq, count in missing if count > most])

    def advance(self, work: list[tuple[Text, tuple[Token, ...]]]) -> torch.Tensor:
        """Read what is missing of each text and its draft; logits after the last token of each, [len(work), vocab]."""
        return self._read([Span(s.id, self.length(s), tuple(self._missing(s, draft))) for s, draft in work])

    def score(self, spans: list[Span]) -> torch.Tensor:
        """The draft model's logits for the tokens both models know, [rows, vocab]. Nothing is noted as cached."""
        return self.model.score(spans).logits[:, : self.vocab_size]

    def add_chain(self, seq: Text, chain: Seq[Token]) -> None:
        """Note a chain drafted on the device behind the text as it is now."""
        cached = self._cached[seq.id]
        cached += seq.tokens[len(cached) :]
        self._chains[seq.id] = chain[:-1]

    def has_chain(self, seq: Text) -> bool:
        """Whether a noted chain begins at the end of the text as it is now."""
        return seq.id in self._chains and len(self._cached[seq.id]) == len(seq.tokens)

    def add_pending_chain(self, seq: Sequence, chain: Seq[Token]) -> None:
        """Note a chain drafted behind the text as the round in flight will leave it."""
        self._pending[seq.id] = chain, seq.round + 1

    def complete(self, seqs: Seq[Sequence]) -> None:
        """Note chains behind rounds that have just completed; drop those of earlier rounds, whose start is unknown."""
        for seq in seqs:
            chain, number = self._pending.get(seq.id, ((), 0))
            if chain and seq.round >= number:
                del self._pending[seq.id]
                if seq.round == number:
                    self.add_chain(seq, chain)

    def _room(self, seq: Text) -> int:
        """How many tokens the context and the pages allow behind the text; negative if it is too long already."""
        pool = self.model.pool
        pages = len(pool.table(seq.id)) + pool.free
        return min(self.model.context, pages * pool.size) - len(seq.tokens)

    def _missing(self, seq: Text, draft: Seq[Token]) -> list[Token]:
        """The tokens of a text and a draft behind it that are not cached; no more of a long text is copied."""
        cached = len(self._cached[seq.id])
        return [*seq.tokens[cached:], *draft[max(0, cached - len(seq.tokens)) :]]

    def _read(self, spans: list[Span]) -> torch.Tensor:
        logits = self.score(spans)
        for span in spans:
            self._cached[span.seq_id] += span.tokens
        return logits


def _common(a: Seq[Token], b: Seq[Token]) -> int:
    """The length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
