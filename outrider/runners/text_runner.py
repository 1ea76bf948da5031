"""The base of what runs a drafting head over its target's pages: drafts, reads of what the target keeps, batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, Generic, Protocol, TypeVar

import torch

from outrider.core.sequence import Sequence, Span
from outrider.models.heads.config import HeadConfig
from outrider.runners.attention import AttentionLayers
from outrider.runners.cuda_graphs import MAX_ROWS, capture_batches, padded_batch
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import DraftTexts, HeadDraft, HeadShape, Share, attention_workspace, joined
from outrider.runners.head_reads import HeadReads, reading_passes, ready_texts
from outrider.runners.paged_model import PagedModel, tapped_pages
from outrider.runners.threads import use_threads


class TextBatch(Protocol):
    """A head's passes for up to B sequences."""

    def draft(self, texts: DraftTexts, length: int) -> HeadDraft:
        """Read each text from its position in `firsts` on, then draft `length` tokens for it."""
        ...

    def repeat(self, count: int, state: DeviceState) -> HeadDraft | None:
        """Repeat the last draft from this state of the same sequences; None where it needs inputs of its own."""
        ...


BatchT = TypeVar("BatchT", bound=TextBatch)


class TextRunner(ABC, Generic[BatchT]):
    """Drafts with a head, which reads what the target has read when it is asked to draft.

    The head's keys and values lie in the target's pages: they are shared, rolled back and freed with the target's own.
    So do the target's tokens and tapped outputs, from which the head reads.
    """

    def __init__(
        self,
        model: PagedModel,
        config: HeadConfig,
        reads: HeadReads,
        *,
        rows: int,
        row_width: int,
        skip: int = 0,
        graph_pool: Any = None,
    ) -> None:
        """rows: rows of a text that a draft writes in all, that of its last token first. row_width: max of one pass.

        skip: see `Head.skip`. graph_pool: the memory pool of captured graphs; None: nothing is captured.
        """
        self.model, self.reads, self.rows, self.graph_pool = model, reads, rows, graph_pool
        scale = config.head_dim**-0.5
        caches = model.add_layers(config.layers, config.kv_heads, config.head_dim) if config.layers else []
        self.layers = AttentionLayers(caches, [config.window] * config.layers, scale, skip=skip)
        self.shape = HeadShape(config.heads, config.kv_heads, config.head_dim, scale)
        self.workspace = attention_workspace(model, self.shape) if config.layers else None
        self.width = reads.width
        self.max_batch = 1 << (MAX_ROWS // max(self.width, row_width)).bit_length() - 1
        """Max sequences of one drafting pass; more sequences take several passes."""
        self.kept = tapped_pages(model)
        self._batches: dict[int, BatchT] = {}

    @abstractmethod
    def make_batch(self, size: int) -> BatchT:
        """The passes for `size` sequences."""

    @abstractmethod
    def length_of(self, length: int) -> int:
        """The number of tokens that are drafted where `length` are wanted; 0: all."""

    @abstractmethod
    def read(self, spans: Seq[Span]) -> None:
        """Read text whose every token is known and that the target has read."""

    def ready(self, seqs: Seq[Sequence], state: DeviceState | None) -> list[int]:
        """The indices of the sequences that can be drafted for: the target has read them, and the draft has pages.

        state: theirs, where the host is a round behind.
        """
        return ready_texts(self.model, seqs, self.reads.gains(seqs, state), self.width, self.rows)

    @torch.inference_mode()
    def draft(
        self, seqs: Seq[Sequence], state: DeviceState | None, length: int = 0, share: Share | None = None
    ) -> HeadDraft:
        """A draft for each of these sequences, all `ready`. state: theirs, where the host is a round behind.

        length: the number of tokens wanted, 0: all; more may come. share: how drafts share rows; only up to `max_batch`
        sequences.
        """
        length = self.length_of(length)
        made: list[HeadDraft] = []
        gained = self.reads.gains(seqs, state)
        with use_threads(self.model.threads.count):
            for at in range(0, len(seqs), self.max_batch):
                part = range(at, min(at + self.max_batch, len(seqs)))
                whole = len(part) == len(seqs)
                own, there = (seqs, state) if whole else ([seqs[i] for i in part], state and state.take(part))
                firsts = self.catch_up(own, [gained[i] for i in part])
                ids = self.model.tables.table_ids([seq.id for seq in own])
                drafts = self._batch(len(own)).draft(DraftTexts(ids, own, firsts, there, share), length)
                made.append(drafts if whole else drafts.copied())
        for seq, gain in zip(seqs, gained, strict=True):
            self.reads.note(seq, gain)
        return made[0] if len(made) == 1 else joined(made)

    def repeat(self, seqs: Seq[Sequence], state: DeviceState) -> HeadDraft | None:
        """Repeat the last draft, for the same sequences a round later; None where `draft` must be called."""
        if len(seqs) > self.max_batch:
            return None
        made = self._batch(len(seqs)).repeat(len(seqs), state)
        if made is not None:
            self.reads.note_again(seqs)
        return made

    def catch_up(self, seqs: Seq[Sequence], gained: Seq[int]) -> list[int]:
        """Read what a drafting pass has no room for; returns the position at which that pass begins in each text."""
        unread = [self.reads.unread(seq, gain) for seq, gain in zip(seqs, gained, strict=True)]
        for spans in reading_passes([each for each in zip(seqs, unread, strict=True) if each[1].start < each[1].end]):
            self.read(spans)
        return [each.end for each in unread]

    def forget(self, seq: Sequence) -> None:
        self.reads.forget(seq)

    def capture(self, batch: int) -> Iterator[str]:
        """Capture drafts for up to `batch` sequences; yields a description of each that is ready."""
        if self.graph_pool is not None:
            for size in capture_batches(min(batch, self.max_batch)):
                self._batch(size)
                yield f"a head's drafts for {size}"

    def _batch(self, count: int) -> BatchT:
        size = count if self.graph_pool is None else padded_batch(count)
        if size not in self._batches:
            self._batches[size] = self.make_batch(size)
        return self._batches[size]
