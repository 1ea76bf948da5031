"""A prompt as a chat template writes it. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as its chat template wrote it."""

    text: str
    control: tuple[tuple[int, int], ...] | None = None
    """Start and end of each special token that the template wrote, all others are text; None: it wrote them all."""

    def first(self, size: int) -> RenderedChat:
        """The first `size` characters."""
        if self.control is None:
            return RenderedChat(self.text[:size])
        return RenderedChat(self.text[:size], tuple(each for each in self.control if each[1] <= size))
