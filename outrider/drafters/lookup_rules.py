"""What a model-free drafter looks up on the device, and when it does so there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.sampling import Token
from outrider.drafters.base import DrafterContext, Traits
from outrider.runners.base import Runner

MAX_MIN_PROB = 0.5
"""A token that is at least this likely is drafted in any batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRules:
    """What is looked up, and how many tokens are drafted after a match."""

    traits: Traits
    priors: Seq[float]
    """By length of match, up to the longest and a whole draft: the probability that the next token follows again."""
    limits: Seq[int]
    """By length of match, from 0 to the longest looked for: max tokens drafted after it."""
    min_prob: float
    """A token is drafted while its probability of acceptance is at least this."""
    row_share: float = 0.0
    """The probability is also at least this times the number of sequences in the batch, up to MAX_MIN_PROB: the time of
    a further row is lost to every sequence that shares the pass."""
    start: tuple[float, float] = (1.0, 1.0)
    """The ratio of tokens that come true to those expected, at first: for matches in the text, and in other answers."""
    ring_tokens: int = 0
    """Max tokens of finished answers to draft from."""
    ring_answers: int = 0
    predicted: bool = False
    """The answer is looked up in `Sequence.prediction`, and nowhere else."""
    history: Seq[Seq[Token]] = ()
    """Answers that are there from the start and match for every salt; later answers overwrite them in time."""


def looks_up_on_device(context: DrafterContext) -> Runner | None:
    """The target if lookups run on its device, where rounds overlap and drafts may not wait for the host; else None."""
    target = context.target
    if context.mode != "seeded" or target is None or not target.asynchronous or target.device.type != "cuda":
        return None
    return target
