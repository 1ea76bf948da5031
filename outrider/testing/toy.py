"""Fakes to build and test with: a toy target and a byte tokenizer. Scripted drafters are in drafters.py, a synthetic
pair of models in synthetic.py.

They keep the real contracts, so that a new drafter can be tried without a model, and speed
measured without weights.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache, partial

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.kvcache.pages import PagePool
from outrider.runners.base import Runner, Scores
from outrider.runners.device_state import DeviceState, resolve_spans, row_positions


class ByteTokenizer:
    """One token a byte, 256 in all, and an end-of-text token, 256."""

    vocab_size = 257
    eos_ids = frozenset({256})
    token_bytes = (*(bytes([i]) for i in range(256)), b"")
    own_texts = None

    def encode(self, text: str) -> list[Token]:
        return list(text.encode())

    def decode(self, ids: Seq[Token]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class ToyRunner(Runner):
    """A cheap runner whose logits are random numbers that depend only on the last few tokens.

    Its cache is real: tokens are stored in the slots of their pages and read back through the block table, so that a
    wrong page, a bad rollback or a stale branch changes the text.
    """

    def __init__(self, vocab_size: int = 64, *, context: int = 512, cache_tokens: int = 4096, order: int = 2) -> None:
        self.vocab_size, self.context, self.order = vocab_size, context, order
        self.device = torch.device("cpu")
        self.pool = PagePool(-(-cache_tokens // 16))
        self.slots = [-1] * (self.pool.count * self.pool.size)
        self._row = lru_cache(maxsize=4096)(self._make_row)

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        positions = None
        if after is not None:
            spans = resolve_spans(spans, after)
            positions = partial(row_positions, spans)
        rows: list[Tensor] = []
        for span in spans:
            end = span.start + len(span.tokens)
            for i, token in enumerate((*span.tokens, *span.draft.tokens)):
                self.slots[self._slot(span.seq_id, span.start + i)] = token
            if span.wanted:
                text = [self.slots[self._slot(span.seq_id, p)] for p in range(end)]
                if -1 in text:
                    raise OutriderError(f"sequence {span.seq_id} reads a slot that nobody wrote")
                rows.append(self._row(tuple(text[-self.order :])))
                for node in range(len(span.draft)):
                    way = [self.slots[self._slot(span.seq_id, end + n)] for n in span.draft.path(node)]
                    rows.append(self._row(tuple((text + way)[-self.order :])))
        return Scores(torch.stack(rows) if rows else torch.empty(0, self.vocab_size), spans, positions=positions)

    def keep(self, span: Span, path: Seq[int], *, compacted: bool = False, trim: bool = True) -> int:
        end = span.start + len(span.tokens)
        if compacted:
            path = range(len(path))
        kept = [self.slots[self._slot(span.seq_id, end + node)] for node in path]
        for i, token in enumerate(kept):
            self.slots[self._slot(span.seq_id, end + i)] = token
        if trim:
            self.pool.trim(span.seq_id, end + len(path))
        return end + len(path)

    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        self.pool.close(seq_id, unpublish=unpublish)

    def logits_after(self, tokens: Seq[Token]) -> Tensor:
        """[vocab]: what `score` returns after this text, for tests to compare with."""
        return self._row(tuple(tokens[-self.order :]))

    def _slot(self, seq_id: int, position: int) -> int:
        return self.pool.table(seq_id)[position // self.pool.size] * self.pool.size + position % self.pool.size

    def _make_row(self, tail: tuple[Token, ...]) -> Tensor:
        mix = 0
        for token in tail:
            mix = (mix * 1_000_003 + token + 1) & 0x7FFFFFFF
        return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(mix)) * 2.5
