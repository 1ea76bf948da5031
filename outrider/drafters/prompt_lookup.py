"""Repeats what followed the last time the current suffix appeared in the text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext
from outrider.drafters.confidence import Confidence, Guess, claim
from outrider.drafters.options import check_options, least_chance


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupConfig:
    """Draft by copying what followed the current suffix earlier in the text."""

    k: int = 7
    """Most tokens proposed in one round."""
    max_match: int = 4
    """Longest suffix looked up; shorter ones are tried next."""
    min_match: int = 1
    """Shortest suffix looked up."""
    min_prob: float | None = None
    """Go no further where the chance that the token stands falls below this; auto: 0.25 on a CPU, else 0.1."""

    def __post_init__(self) -> None:
        check_options("prompt-lookup", self, k=(1, 256), max_match=(1, 64), min_match=(1, 64), min_prob=(0.0, 1.0))
        if self.min_match > self.max_match:
            raise ConfigError(f"prompt-lookup: min_match ({self.min_match}) is more than max_match ({self.max_match})")

    def build(self, setting: DrafterContext) -> PromptLookup:
        return PromptLookup(self, least_chance(self.min_prob, setting))


@dataclass(slots=True)
class _Memory:
    """What is known of one sequence."""

    after: dict[tuple[Token, ...], int] = field(default_factory=dict[tuple[Token, ...], int])
    """N-gram -> the place after its last occurrence, for every n looked up."""
    size: int = 0
    """How many tokens of the text have been entered as followers."""
    trust: Confidence = field(default_factory=Confidence)
    guess: Guess | None = None


class PromptLookup:
    """Copies from the most recent earlier occurrence of the longest suffix that has one.

    A copy that reaches the end of the text goes on through itself, as a repetition would.
    State: for each sequence an index of its n-grams, extended by whatever is new.
    """

    name = "prompt-lookup"

    def __init__(self, config: PromptLookupConfig, min_prob: float) -> None:
        self.config, self.min_prob = config, min_prob
        self.max_tokens = config.k
        self._lengths = range(config.max_match, config.min_match - 1, -1)
        self._memories: dict[int, _Memory] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(k, self.config.k)) for seq, k in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Nothing to do: guesses are judged by the text at the next proposal."""

    def forget(self, seq: Sequence) -> None:
        self._memories.pop(seq.id, None)

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        if budget < 1:
            return EMPTY
        memory = self._memories.setdefault(seq.id, _Memory())
        self._read(memory, seq.tokens)
        if memory.guess is not None:
            memory.trust.settle(memory.guess, seq.tokens)
        memory.guess = self._look_up(memory, seq.tokens, budget)
        if memory.guess is None:
            return EMPTY
        count, expected = memory.trust.worth(memory.guess, self.min_prob)
        return Draft(memory.guess.tokens[:count], source=self.name, expected=expected) if count else EMPTY

    def _read(self, memory: _Memory, text: list[Token]) -> None:
        """Enter what is new. An n-gram is entered once it has a follower."""
        for at in range(memory.size, len(text)):
            for n in self._lengths:
                if n <= at:
                    memory.after[tuple(text[at - n : at])] = at
        memory.size = len(text)

    def _look_up(self, memory: _Memory, text: list[Token], count: int) -> Guess | None:
        for n in self._lengths:
            place = memory.after.get(tuple(text[-n:])) if n <= len(text) else None
            if place is not None:
                copied = tuple(text[place : place + count])
                copied = (copied * (count // len(copied) + 1))[:count]
                return Guess(len(text), n, copied, tuple(claim(n + i, 1, 1) for i in range(count)))
        return None
