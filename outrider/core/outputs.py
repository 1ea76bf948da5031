"""What is reported beside the text: log-probabilities, and where each token came from. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.core.sampling import Token

Origin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the target's own law (temperature 1, no options)."""

    token: Token
    logprob: float
    rank: int
    top: tuple[tuple[Token, float], ...] = ()
    """The most likely tokens there, best first."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Who brought a token: drafted and accepted, the target's correction, or its bonus."""

    origin: Origin
    drafter: str
    """Empty where nobody drafted."""
    position: int
    """Place in the draft, from 0; where the target spoke, how many had been accepted."""
    round: int
    drafted: int
    """Tokens drafted in that round."""
    draft_prob: float | None = None
    """What the drafter gave an accepted token; None where it stated no law."""
