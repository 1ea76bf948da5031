"""What is reported for each token: its log-probability, and where it came from. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from outrider.core.sampling import Token

Origin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability in the target's own distribution (temperature 1, no options)."""

    token: Token
    logprob: float
    rank: int
    top: tuple[tuple[Token, float], ...] = ()
    """The most likely tokens at that position, best first."""


class Provenance(NamedTuple):
    """Where a token came from: an accepted draft token, a recovered token, a bonus token, or plain decoding."""

    origin: Origin
    drafter: str
    """Empty where nothing was drafted."""
    position: int
    """Position in the draft, from 0; for a token of the target, how many draft tokens were accepted before it."""
    round: int
    drafted: int
    """Tokens drafted in that round."""
    draft_prob: float | None = None
    """The drafter's probability of an accepted token; None where it states none."""
