"""How far a head has read its target's texts, as the host knows it.

A head does not follow its target: it reads when it is asked to draft, from what the target keeps in its pages. So a
head that is not asked costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from outrider.core.sequence import Sequence, Span
from outrider.kvcache.pages import PagePool
from outrider.runners.device_state import DeviceState
from outrider.runners.paged_model import PagedModel

MAX_READ_ROWS = 4096
"""Max rows of a pass that only reads."""


class Unread(NamedTuple):
    """What a head has not read of a text: a reading pass takes `start` to `end`, the drafting pass what follows.

    Where both are equal, the drafting pass reads all.
    """

    start: int
    end: int


@dataclass(slots=True)
class _Read:
    """What a head had read of a text when it last drafted for it."""

    pages: list[int]
    """The sequence's page list in the pool itself: another list if the sequence was closed and opened again."""
    length: int = 0
    """The number of positions that were read, at least."""
    round: int = 0
    """The sequence's round in which it was drafted for."""
    ahead: bool = False
    """Whether the host was a round behind the device."""
    marked: int = 0
    """The number of pages that are marked as read."""


class HeadReads:
    """Which positions of its target's pages a head has read, by text, and by page for texts that share one."""

    def __init__(self, pool: PagePool, width: int, *, last: bool) -> None:
        """width: max rows of a text that a drafting pass reads. last: the last token, which is not cached, included."""
        self.pool, self.width, self._behind = pool, width, int(not last)
        self._texts: dict[int, _Read] = {}
        self._marks = [0] * pool.count
        """For each page, the value of `PagePool.writes` when all of the page had been read."""

    def gains(self, seqs: Seq[Sequence], state: DeviceState | None) -> list[int]:
        """Max tokens that each text may have beyond those the host knows: 0 without a state.

        If this head made the draft in flight, tree or chain, that has at most `width` - 1 tokens in a row.
        """
        if state is None:
            return [0] * len(seqs)
        most = self.width - 1
        drafted = [most] * len(seqs) if state.drafted is None else state.drafted
        return [
            1 + (most if count > most and self.is_drafted(seq) else count)
            for seq, count in zip(seqs, drafted, strict=True)
        ]

    def is_drafted(self, seq: Sequence) -> bool:
        """Whether the draft in flight is this head's."""
        read = self._texts.get(seq.id)
        return read is not None and read.round + read.ahead == seq.round

    def unread(self, seq: Sequence, gained: int) -> Unread:
        """What must be read before this text is drafted for. gained: see `gains`."""
        length, pages, read = len(seq.tokens), self.pool.table(seq.id), self._texts.get(seq.id)
        known = length - self._behind
        end = known if gained else length - 1
        if read is None or read.pages is not pages:
            start = self._marked(pages) * self.pool.size
        elif gained and read.ahead and seq.round == read.round + 1:
            start = known  # what the host knows now is what the device knew then
        else:
            start = read.length
        start = min(start, end)
        return Unread(start, start if known + gained - start <= self.width else end)

    def note(self, seq: Sequence, gained: int) -> None:
        """Note that all of a text was read, and that it was drafted for."""
        pages, read = self.pool.table(seq.id), self._texts.get(seq.id)
        length = len(seq.tokens) - self._behind + (gained > 0)
        whole = length // self.pool.size
        if read is None or read.pages is not pages:
            read = self._texts[seq.id] = _Read(pages)
        if whole > read.marked:
            for page in pages[read.marked : whole]:
                self._marks[page] = self.pool.writes[page]
            read.marked = whole
        read.length, read.round, read.ahead = length, seq.round, gained > 0

    def note_again(self, seqs: Seq[Sequence]) -> None:
        """As `note` behind a round in flight, for texts noted a round before. Marks no pages: the next `note` does."""
        texts, behind = self._texts, self._behind
        for seq in seqs:
            read = texts[seq.id]
            read.length, read.round, read.ahead = len(seq.tokens) - behind + 1, seq.round, True

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)

    def _marked(self, pages: Seq[int]) -> int:
        """The number of a text's first pages that this head has read, for whichever text."""
        return next((i for i, page in enumerate(pages) if self._marks[page] != self.pool.writes[page]), len(pages))


def ready_texts(model: PagedModel, seqs: Seq[Sequence], gained: Seq[int], width: int, rows: int) -> list[int]:
    """Indices of the sequences a head can draft for: the target has read all but their last token, pages are reserved.

    gained: see `HeadReads.gains`. width: max rows of a text that a drafting pass reads. rows: rows of a text that it
    writes, that of the text's last token first.
    """
    pool, most = model.pool, model.tables.width
    ready: list[int] = []
    for i, (seq, gain) in enumerate(zip(seqs, gained, strict=True)):
        length = len(seq.tokens)
        decodes = gain > 0 or seq.cached == length - 1
        end = min(length + gain, seq.limit) - 1 + rows
        if decodes and gain <= width and -(-end // pool.size) <= most and pool.reserve(seq.id, end):
            ready.append(i)
    return ready


def reading_passes(texts: Seq[tuple[Sequence, Unread]]) -> Iterator[list[Span]]:
    """The spans of passes of at most MAX_READ_ROWS rows that read these texts' positions from `start` to `end`."""
    spans: list[Span] = []
    room = MAX_READ_ROWS
    for seq, (start, end) in texts:
        while start < end:
            count = min(room, end - start)
            spans.append(Span(seq.id, start, tuple(seq.tokens[start : start + count]), wanted=False))
            start, room = start + count, room - count
            if not room:
                yield spans
                spans, room = [], MAX_READ_ROWS
    if spans:
        yield spans
