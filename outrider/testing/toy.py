"""Fakes to build and test with: a toy target, scripted drafters, a byte tokenizer, a synthetic pair of models.

They keep the real contracts, so that a new drafter can be tried without a model, and speed
measured without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import lru_cache

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.kvcache.pages import PagePool
from outrider.runners.base import ChainStart
from outrider.runners.device_state import DeviceState


class ByteTokenizer:
    """One token a byte, 256 in all, and an end-of-text token, 256."""

    vocab_size = 257
    eos_ids = frozenset({256})
    token_bytes = (*(bytes([i]) for i in range(256)), b"")

    def encode(self, text: str) -> list[Token]:
        return list(text.encode())

    def decode(self, ids: Seq[Token]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class ToyRunner:
    """A target whose logits depend on the last few tokens alone. Cheap, lively, and strict.

    Its cache is real: tokens are stored in the slots of their pages and read back through
    the page table, so that a wrong page, a bad rollback or a stale branch changes the text.
    """

    scores_trees = True
    row_block = 1
    launches = False
    rewinds = True

    def __init__(self, vocab_size: int = 64, *, context: int = 512, cache_tokens: int = 4096, order: int = 2) -> None:
        self.vocab_size, self.context, self.order = vocab_size, context, order
        self.device = torch.device("cpu")
        self.pool = PagePool(-(-cache_tokens // 16))
        self.slots = [-1] * (self.pool.count * self.pool.size)
        self._row = lru_cache(maxsize=4096)(self._make_row)

    def score(self, spans: Seq[Span]) -> Tensor:
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
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def stand(self, choices: Tensor) -> DeviceState | None:
        """Not here: passes are waited for."""

    def score_behind(self, standing: DeviceState, seq_ids: Seq[int], drafts: Seq[Draft]) -> Tensor:
        """As if the device had said where the texts stand."""
        told = zip(seq_ids, standing.lengths.tolist(), standing.last.tolist(), drafts, strict=True)
        return self.score([Span(i, length - 1, (last[1],), draft) for i, length, last, draft in told])

    def keep(self, span: Span, path: Seq[int], *, trim: bool = True) -> int:
        end = span.start + len(span.tokens)
        kept = [self.slots[self._slot(span.seq_id, end + node)] for node in path]
        for i, token in enumerate(kept):
            self.slots[self._slot(span.seq_id, end + i)] = token
        if trim:
            self.pool.trim(span.seq_id, end + len(path))
        return end + len(path)

    def draft_chains(self, starts: Seq[ChainStart], steps: int, behind: DeviceState | None = None) -> None:
        """Not here: the drafter asks step by step."""

    def narrow(self, tokens: Seq[Token]) -> None:
        """Not here: there is no head."""

    def prepare(self, batch: int, width: int, steps: int = 0) -> Iterator[str]:
        """Nothing to get ready."""
        return iter(())

    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        self.pool.close(seq_id, unpublish=unpublish)

    def logits_after(self, tokens: Seq[Token]) -> Tensor:
        """[vocab]: what `score` says after this text; for judging from outside."""
        return self._row(tuple(tokens[-self.order :]))

    def _slot(self, seq_id: int, position: int) -> int:
        return self.pool.table(seq_id)[position // self.pool.size] * self.pool.size + position % self.pool.size

    def _make_row(self, tail: tuple[Token, ...]) -> Tensor:
        mix = 0
        for token in tail:
            mix = (mix * 1_000_003 + token + 1) & 0x7FFFFFFF
        return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(mix)) * 2.5
