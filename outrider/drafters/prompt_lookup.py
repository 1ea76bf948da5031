"""Repeats what followed the last time the current suffix appeared in the text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits
from outrider.drafters.confidence import Confidence, Continuation, prior_prob
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.lookup_rules import LookupRules, looks_up_on_device
from outrider.drafters.ngram_index import MAX_INDEXED
from outrider.drafters.options import check_options, default_min_prob, row_share


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupConfig:
    """Draft by copying what followed the current suffix earlier in the text."""

    k: int = 7
    """Max tokens proposed in one round."""
    max_match: int = 4
    """Longest suffix looked up; shorter ones are tried next."""
    min_match: int = 1
    """Shortest suffix looked up."""
    min_prob: float | None = None
    """Stop where a token's probability of acceptance falls below this; auto: 0.25 on a CPU, else 0.1, or in
    larger batches 0.008 a text, 0.5 at most."""

    def __post_init__(self) -> None:
        check_options("prompt-lookup", self, k=(1, 256), max_match=(1, 64), min_match=(1, 64), min_prob=(0.0, 1.0))
        if self.min_match > self.max_match:
            raise ConfigError(f"prompt-lookup: min_match ({self.min_match}) is more than max_match ({self.max_match})")

    @property
    def traits(self) -> Traits:
        return Traits(name="prompt-lookup", max_tokens=self.k, observes=False)

    def build(self, context: DrafterContext) -> Drafter:
        min_prob, target = default_min_prob(self.min_prob, context), looks_up_on_device(context)
        if target is None:
            return PromptLookup(self, min_prob)
        return DeviceLookup(
            replace(self.rules(min_prob), row_share=row_share(self.min_prob)), target, context.max_batch
        )

    def rules(self, min_prob: float) -> LookupRules:
        """The rules of lookups on the device in place of `PromptLookup`."""
        return LookupRules(
            traits=self.traits,
            priors=[prior_prob(match, 1, 1) for match in range(self.max_match + self.k)],
            limits=[self.k if match >= self.min_match else 0 for match in range(self.max_match + 1)],
            min_prob=min_prob,
        )


@dataclass(slots=True)
class _LookupState:
    """What is kept of one sequence."""

    after: dict[tuple[Token, ...], int] = field(default_factory=dict[tuple[Token, ...], int])
    """N-gram -> the place after its last occurrence, for every n looked up."""
    indexed: int = 0
    """The number of tokens of the text that have been entered as followers."""
    confidence: Confidence = field(default_factory=Confidence)
    continuation: Continuation | None = None


class PromptLookup(Drafter):
    """Copies from the most recent earlier occurrence of the longest suffix that has one.

    A copy that reaches the end of the text continues with its own tokens, as a repetition would.
    State: for each sequence an index of its n-grams, extended by what is new, at most `MAX_INDEXED`
    tokens a round; nothing is proposed before the index has the whole text.
    """

    def __init__(self, config: PromptLookupConfig, min_prob: float) -> None:
        self.traits, self.min_prob = config.traits, min_prob
        self._lengths = range(config.max_match, config.min_match - 1, -1)
        self._states: dict[int, _LookupState] = {}

    def propose(self, view: RoundView) -> list[Draft]:
        return [self._propose(seq, budget) for seq, budget in zip(view.seqs, view.budgets, strict=True)]

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.id, None)

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        if budget < 1:
            return EMPTY
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = _LookupState()
        self._index(state, seq.tokens)
        if state.indexed < len(seq.tokens):
            return EMPTY
        if state.continuation is not None:
            state.confidence.judge(state.continuation, seq.tokens)
        state.continuation = self._look_up(state, seq.tokens, min(budget, self.traits.max_tokens))
        if state.continuation is None:
            return EMPTY
        count, expected = state.confidence.expected_accepted(state.continuation, self.min_prob)
        return Draft(state.continuation.tokens[:count], source=self.traits.name, expected=expected) if count else EMPTY

    def _index(self, state: _LookupState, text: list[Token]) -> None:
        """Enter the new tokens. An n-gram is entered once it has a follower."""
        end = min(len(text), state.indexed + MAX_INDEXED)
        for at in range(state.indexed, end):
            for n in self._lengths:
                if n <= at:
                    state.after[tuple(text[at - n : at])] = at
        state.indexed = end

    def _look_up(self, state: _LookupState, text: list[Token], count: int) -> Continuation | None:
        for n in self._lengths:
            place = state.after.get(tuple(text[-n:])) if n <= len(text) else None
            if place is not None:
                copied = tuple(text[place : place + count])
                copied = (copied * (count // len(copied) + 1))[:count]
                return Continuation(len(text), n, copied, tuple(prior_prob(n + i, 1, 1) for i in range(count)))
        return None
