"""What it takes a drafter to begin: it reads texts, or brings them to the device, and drafts little meanwhile."""

from __future__ import annotations

from outrider.control.costs import size_of

_LAST_PART = 0.3
"""How much the last beginning counts."""


class Beginnings:
    """The seconds that are lost where a drafter begins, by size of batch, measured whenever one does."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], float] = {}
        """By drafter and `size_of` the batch."""
        self._under_way: tuple[int, int] | None = None
        """The same, of the beginning that goes on."""
        self._lost = 0.0
        """Seconds that it has lost so far."""

    def note(self, drafter: int, batch: int, lost: float, *, begun: bool) -> None:
        """Note rounds. lost: seconds beyond those in which as many tokens should come. begun: they go on as others."""
        key = drafter, size_of(batch)
        if begun:
            if self._under_way == key:
                known, seconds = self._known.get(key), max(0.0, self._lost)
                self._known[key] = seconds if known is None else known + _LAST_PART * (seconds - known)
            self._under_way = None
            return
        if self._under_way != key:
            self._under_way, self._lost = key, 0.0
        self._lost += lost

    def drop(self) -> None:
        """Another drafter is asked, or none: what was lost so far is not a whole beginning."""
        self._under_way = None

    def seconds(self, drafter: int, batch: int) -> float:
        """What is lost where this drafter begins; 0 where it never did."""
        return self._known.get((drafter, size_of(batch)), 0.0)
