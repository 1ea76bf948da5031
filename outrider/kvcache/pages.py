"""Pages of the key/value cache: who owns which, and which hold text that others may share.

Host only: no tensors. A page is *blank*, *owned* by one or more sequences, or *idle*: owned
by nobody but still holding published text, to be shared again or taken when blanks run out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.core.errors import OutriderError
from outrider.core.sampling import Token

Name = int | str  # of a text in whole pages: a number; of no text yet: the salt
Key = tuple[Name, tuple[Token, ...]]  # (name of the text before the page, the page's own tokens)


@dataclass(slots=True)
class Holding:
    """One sequence's pages, in order; `names` identifies the text up to each published page."""

    pages: list[int] = field(default_factory=list[int])
    names: list[int] = field(default_factory=list[int])
    salt: str = ""


class PagePool:
    """Hands out pages of `size` tokens. Published pages are full, committed and never written again."""

    def __init__(self, count: int, size: int = 16, *, share: bool = True) -> None:
        self.count, self.size, self.share = count, size, share
        self._blank = bytearray(b"\x01") * count
        self._blanks = count
        self._owners = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._holdings: dict[int, Holding] = {}
        self._shared: dict[Key, tuple[int, int]] = {}  # key -> (page, name of the text up to its end)
        self._keys: dict[int, Key] = {}  # published page -> key
        self._names = 0

    @property
    def free(self) -> int:
        """Pages that could be handed out now."""
        return self._blanks + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - self.free

    def open(self, seq_id: int, tokens: Seq[Token], salt: str = "") -> int:
        """Start a sequence on whatever pages already hold its beginning.

        Returns how many tokens those are: whole pages, and never all of the text, since
        the last token must be read to know what follows it.
        """
        holding = self._holdings[seq_id] = Holding(salt=salt)
        name: Name = salt
        for start in range(0, len(tokens) - self.size if self.share else 0, self.size):
            found = self._shared.get((name, tuple(tokens[start : start + self.size])))
            if found is None:
                break
            page, name = found
            self._own(page)
            holding.pages.append(page)
            holding.names.append(name)
        return len(holding.pages) * self.size

    def reserve(self, seq_id: int, length: int) -> bool:
        """Own pages for `length` tokens. All or nothing."""
        holding = self._holdings[seq_id]
        missing = -(-length // self.size) - len(holding.pages)
        if missing > self.free:
            return False
        for _ in range(missing):
            holding.pages.append(self._take(holding.pages[-1] if holding.pages else None))
        return True

    def trim(self, seq_id: int, length: int) -> None:
        """Give back the pages beyond `length` tokens."""
        pages = self._holdings[seq_id].pages
        for _ in range(len(pages) - -(-length // self.size)):
            self._disown(pages.pop())

    def publish(self, seq_id: int, tokens: Seq[Token], cached: int) -> None:
        """Let others share the pages that tokens[:cached] fills."""
        holding = self._holdings[seq_id]
        while self.share and (len(holding.names) + 1) * self.size <= cached:
            index = len(holding.names)
            key = (
                holding.names[-1] if holding.names else holding.salt,
                tuple(tokens[index * self.size : (index + 1) * self.size]),
            )
            if key in self._shared:  # another sequence wrote the same text first: follow its name
                holding.names.append(self._shared[key][1])
                continue
            self._names += 1
            self._shared[key] = (holding.pages[index], self._names)
            self._keys[holding.pages[index]] = key
            holding.names.append(self._names)

    def close(self, seq_id: int, *, unpublish: bool = False) -> None:
        """Give all pages back. `unpublish`: what they hold is not to be trusted, so not to be shared."""
        pages = self._holdings.pop(seq_id).pages
        for page in reversed(pages):  # the end of a text goes idle first, so is evicted first
            if unpublish and self._owners[page] == 1:
                self._retract(page)
            self._disown(page)

    def table(self, seq_id: int) -> list[int]:
        return self._holdings[seq_id].pages

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._holdings

    def check(self) -> None:
        """Raise unless every page is accounted for exactly once."""
        owners = [0] * self.count
        for holding in self._holdings.values():
            for page in holding.pages:
                owners[page] += 1
        if owners != self._owners:
            raise OutriderError("page owners do not match the sequences' tables")
        for page in range(self.count):
            states = (owners[page] > 0) + (page in self._idle) + self._blank[page]
            if states != 1:
                raise OutriderError(f"page {page} is in {states} states at once; it must be owned, idle or blank")
        if self._blanks != sum(self._blank):
            raise OutriderError(f"{self._blanks} blank pages counted, {sum(self._blank)} found")
        if {key: page for page, key in self._keys.items()} != {key: page for key, (page, _) in self._shared.items()}:
            raise OutriderError("published pages and their keys disagree")
        if any(self._blank[page] for page in self._keys):
            raise OutriderError("a blank page is still published")

    def _own(self, page: int) -> None:
        self._owners[page] += 1
        self._idle.pop(page, None)

    def _disown(self, page: int) -> None:
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if page in self._keys:
            self._idle[page] = None
        else:
            self._blank[page] = 1
            self._blanks += 1

    def _retract(self, page: int) -> None:
        if key := self._keys.pop(page, None):
            del self._shared[key]

    def _take(self, after: int | None) -> int:
        """A page nobody owns: the one after `after` if it can be, since runs of pages need no gathering."""
        page = -1 if after is None or after + 1 >= self.count else after + 1
        if page < 0 or not self._blank[page]:
            page = self._roomiest() if self._blanks else next(iter(self._idle))
        if self._blank[page]:
            self._blank[page] = 0
            self._blanks -= 1
        else:
            del self._idle[page]
            self._retract(page)
        self._owners[page] = 1
        return page

    def _roomiest(self) -> int:
        """Where a new run has most room to grow: inside the longest run of blanks.

        Its middle, unless it begins the pool: the page before it may belong to a text still growing.
        """
        best, start = (0, 0), self._blank.find(1)
        while start >= 0:
            end = self._blank.find(0, start)
            end = self.count if end < 0 else end
            best = max(best, (end - start, -start))
            start = self._blank.find(1, end)
        length, start = best[0], -best[1]
        return start if start == 0 else start + length // 2
