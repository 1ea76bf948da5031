"""Which of a device's ceilings binds a model's passes: reading the weights, or computing with them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.runners.pass_work import PassWork


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A device's peak rates, each measured by an operation that does little else."""

    bandwidth: float
    """Bytes a second read and written by a large copy."""
    arithmetic: float
    """Operations a second of a large matrix product; a multiplication and an addition are two."""


@dataclass(frozen=True, slots=True)
class PassLimits:
    """What one model's passes are bound by on one device."""

    work: PassWork
    ceilings: Ceilings

    def describe(self, rows: float) -> dict[str, object]:
        """Whether passes of this many rows are bound by memory or by arithmetic, and the seconds that each takes."""
        reading = self.work.bytes_read(rows) / self.ceilings.bandwidth
        computing = self.work.operations(rows) / self.ceilings.arithmetic
        return {
            "rows": rows,
            "bound": "memory" if reading >= computing else "compute",
            "reading_seconds": reading,
            "computing_seconds": computing,
            "bandwidth": self.ceilings.bandwidth,
            "arithmetic": self.ceilings.arithmetic,
        }
