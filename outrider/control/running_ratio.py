"""The ratio of two decayed sums, as of seconds to tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunningRatio:
    """The ratio of two decayed sums. Changed in place, since every round adds to them."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float, kept: float) -> None:
        """kept: the part of what was there before that is not forgotten."""
        self.above, self.below = kept * self.above + above, kept * self.below + below

    @property
    def value(self) -> float:
        """0 where nothing was added."""
        return self.above / self.below if self.below > 0 else 0.0
