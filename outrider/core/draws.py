"""What the target's choices depend on where no option but temperature affects them. Data only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draws:
    """For each sequence of a round, what its choices depend on besides the logits and their positions."""

    seeds: Seq[int]
    temperatures: Seq[float]
    """0 takes the most likely token."""
    logits: bool = True
    """Whether the logits are needed as well as the choices, as for log-probabilities."""
