"""How a target chooses its tokens where that is by temperature and noise alone. Data only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draws:
    """For each sequence of a round: what its choices depend on beside the logits and their positions."""

    seeds: Seq[int]
    temperatures: Seq[float]
    """0: the best token."""
    logits: bool = True
    """Whether anybody reads the logits besides."""
