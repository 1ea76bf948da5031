"""Pages of the key/value cache: who owns which, and which hold text that others may share.

Host only: no tensors. A page is *owned* by one or more sequences, *cached*: owned by none but holding
published text, to be shared again or evicted when no page is empty, or *empty*.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.core.errors import OutriderError
from outrider.core.sampling import Token

PrefixId = int | str  # names the text up to a page's end: a number; before the first page: the salt
PageKey = tuple[PrefixId, tuple[Token, ...]]  # (the text before the page, the page's own tokens)

_RUNS = (64, 16, 4)
"""Pages that a new run, and the run before it, are given to grow: the first of these for which there is room."""
_EMPTY_PAGES = bytes([1]) * 2 * _RUNS[0]


@dataclass(slots=True)
class SequencePages:
    """One sequence's pages, in order; `prefixes` names the text up to the end of each published one."""

    pages: list[int] = field(default_factory=list[int])
    prefixes: list[int] = field(default_factory=list[int])
    salt: str = ""


class PagePool:
    """Hands out pages of `size` tokens. Published pages are full, committed and never written again."""

    def __init__(self, count: int, size: int = 16, *, share: bool = True) -> None:
        self.count, self.size, self.share = count, size, share
        self._empty = bytearray(b"\x01") * count
        self._empty_count = count
        self._owners = [0] * count
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._sequences: dict[int, SequencePages] = {}
        self._published: dict[PageKey, tuple[int, int]] = {}  # key -> (page, its prefix id)
        self._keys: dict[int, PageKey] = {}  # published page -> key
        self._prefixes = 0
        self.writes = [0] * count
        """For each page, how often it was handed out to be written: its text is not replaced while that is the same."""
        self.changes = 0
        """How often any sequence's table changed. While the count is the same, so are all tables."""

    @property
    def free(self) -> int:
        """Pages that could be handed out now: empty or cached."""
        return self._empty_count + len(self._cached)

    @property
    def used(self) -> int:
        return self.count - self.free

    def open(self, seq_id: int, tokens: Seq[Token], salt: str = "") -> int:
        """Open a sequence on the published pages that hold its beginning.

        Returns the number of tokens in those pages: whole pages, and never all of the text, since the last token must
        be read to know what follows it.
        """
        own = self._sequences[seq_id] = SequencePages(salt=salt)
        self.changes += 1
        prefix: PrefixId = salt
        for start in range(0, len(tokens) - self.size if self.share else 0, self.size):
            found = self._published.get((prefix, tuple(tokens[start : start + self.size])))
            if found is None:
                break
            page, prefix = found
            self._own(page)
            own.pages.append(page)
            own.prefixes.append(prefix)
        return len(own.pages) * self.size

    def reserve(self, seq_id: int, length: int) -> bool:
        """Own pages for `length` tokens, all or none; returns whether the sequence has them."""
        own = self._sequences[seq_id]
        missing = -(-length // self.size) - len(own.pages)
        if missing <= 0:
            return True
        if missing > self.free:
            return False
        self.changes += 1
        for _ in range(missing):
            own.pages.append(self._take(own.pages[-1] if own.pages else None))
        return True

    def reserve_ahead(self, seq_id: int, length: int) -> None:
        """Own pages for `length` tokens, but take no more than half of the free pages."""
        pages = self._sequences[seq_id].pages
        missing = min(-(-length // self.size) - len(pages), self.free // 2)
        if missing > 0:
            self.reserve(seq_id, (len(pages) + missing) * self.size)

    def trim(self, seq_id: int, length: int) -> None:
        """Give back the pages beyond `length` tokens."""
        pages = self._sequences[seq_id].pages
        beyond = len(pages) - -(-length // self.size)
        self.changes += beyond > 0
        for _ in range(beyond):
            self._disown(pages.pop())

    def publish(self, seq_id: int, tokens: Seq[Token], cached: int) -> None:
        """Let others share the pages that tokens[:cached] fills."""
        own = self._sequences[seq_id]
        while self.share and (len(own.prefixes) + 1) * self.size <= cached:
            index = len(own.prefixes)
            key = (
                own.prefixes[-1] if own.prefixes else own.salt,
                tuple(tokens[index * self.size : (index + 1) * self.size]),
            )
            if key in self._published:  # another sequence wrote the same text first: take its prefix id
                own.prefixes.append(self._published[key][1])
                continue
            self._prefixes += 1
            self._published[key] = (own.pages[index], self._prefixes)
            self._keys[own.pages[index]] = key
            own.prefixes.append(self._prefixes)

    def close(self, seq_id: int, *, unpublish: bool = False) -> None:
        """Close the sequence and give its pages back. unpublish: pages that no other sequence owns are not shared any
        more, since their keys and values may be wrong."""
        pages = self._sequences.pop(seq_id).pages
        self.changes += 1
        for page in reversed(pages):  # the end of a text is cached first, so it is evicted first
            if unpublish and self._owners[page] == 1:
                self._retract(page)
            self._disown(page)

    def table(self, seq_id: int) -> list[int]:
        return self._sequences[seq_id].pages

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def check(self) -> None:
        """Raise unless every page is accounted for exactly once."""
        owners = [0] * self.count
        for own in self._sequences.values():
            for page in own.pages:
                owners[page] += 1
        if owners != self._owners:
            raise OutriderError("page owners do not match the sequences' tables")
        for page in range(self.count):
            states = (owners[page] > 0) + (page in self._cached) + self._empty[page]
            if states != 1:
                raise OutriderError(f"page {page} is in {states} states at once; it must be owned, cached or empty")
        if self._empty_count != sum(self._empty):
            raise OutriderError(f"{self._empty_count} empty pages counted, {sum(self._empty)} found")
        if {key: page for page, key in self._keys.items()} != {key: page for key, (page, _) in self._published.items()}:
            raise OutriderError("published pages and their keys disagree")
        if any(self._empty[page] for page in self._keys):
            raise OutriderError("an empty page is still published")

    def _own(self, page: int) -> None:
        self._owners[page] += 1
        self._cached.pop(page, None)

    def _disown(self, page: int) -> None:
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if page in self._keys:
            self._cached[page] = None
        else:
            self._empty[page] = 1
            self._empty_count += 1

    def _retract(self, page: int) -> None:
        if key := self._keys.pop(page, None):
            del self._published[key]

    def _take(self, after: int | None) -> int:
        """A page that is not owned: the one after `after` if empty, since runs of pages need no gathering of keys."""
        page = -1 if after is None or after + 1 >= self.count else after + 1
        if page < 0 or not self._empty[page]:
            page = self._start_of_run() if self._empty_count else next(iter(self._cached))
        if self._empty[page]:
            self._empty[page] = 0
            self._empty_count -= 1
        else:
            del self._cached[page]
            self._retract(page)
        self._owners[page] = 1
        self.writes[page] += 1
        return page

    def _start_of_run(self) -> int:
        """The first page of a new run: in the first stretch of empty pages that is long enough, or any empty page.

        Not at the start of a stretch, unless the pool starts there: the page before may belong to a text still growing.
        """
        for room in _RUNS:
            start = self._empty.find(_EMPTY_PAGES[: 2 * room])
            if start >= 0:
                return start + room if start else 0
        return self._empty.find(1)
