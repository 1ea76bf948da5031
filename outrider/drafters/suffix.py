"""Repeats what followed the current suffix before, in this text and in finished ones of the same salt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext
from outrider.drafters.confidence import Confidence, Guess, claim
from outrider.drafters.ngram_index import NgramIndex
from outrider.drafters.options import check_options, least_chance
from outrider.drafters.tree_builder import DraftTree, TreeLimits, grow

_SCAN = 16
"""Most occurrences counted, the most recent ones."""


_STRANGE = 0.5
"""What a repetition of another text is worth at first, against one of the text itself (measured on chat)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Draft what followed the current suffix before, in this text and in earlier answers."""

    k: int = 15
    """Most tokens proposed in one round."""
    factor: float = 2.0
    """Most tokens proposed for each token of the match."""
    min_prob: float | None = None
    """Go no further where the chance that the token stands falls below this; auto: 0.25 on a CPU, else 0.1."""
    max_depth: int = 64
    """Most tokens of match and proposal together."""
    width: int = 1
    """Most alternatives proposed for one place; more than 1 proposes trees."""
    cached_requests: int = 10_000
    """Finished answers to draft from, the oldest dropped first; 0 drafts from the text itself only."""
    cached_tokens: int = 262_144
    """Most tokens those answers may have in all."""

    def __post_init__(self) -> None:
        check_options(
            "suffix",
            self,
            k=(1, 256),
            factor=(0.01, 64.0),
            min_prob=(0.0, 1.0),
            max_depth=(2, 1024),
            width=(1, 16),
            cached_requests=(0, 1 << 24),
            cached_tokens=(0, 1 << 28),
        )

    def most_tokens(self, match: int) -> int:
        """Most tokens to propose after a match of this length: a longer one may count as shorter."""
        return int(self.factor * min(match, self.max_depth / (1 + self.factor)))

    def build(self, setting: DrafterContext) -> Suffix:
        return Suffix(self, least_chance(self.min_prob, setting))


@dataclass(slots=True)
class _Memory:
    """What is known of one sequence."""

    own: NgramIndex = field(default_factory=NgramIndex)
    """The text itself."""
    trust_own: Confidence = field(default_factory=Confidence)
    """In guesses from the text itself."""
    trust_answers: Confidence = field(default_factory=lambda: Confidence(_STRANGE))
    """In guesses from finished answers."""
    guess: Guess | None = None
    """The last guess, proposed or not, until the text judges it."""
    guess_trust: Confidence | None = None
    """Where that judgement is counted."""

    def settle(self) -> None:
        """Judge the last guess by the text."""
        if self.guess is not None and self.guess_trust is not None:
            self.guess_trust.settle(self.guess, self.own.text)
        self.guess = self.guess_trust = None


class Suffix:
    """Suffix decoding over occurrence lists, with a running correction of its own claims.

    For every length of match the continuations are counted; the chance of a token is its
    share of the occurrences, discounted where they are few or the match is short
    (`confidence.claim`) and where such guesses failed in this text (`Confidence`). The
    match whose guesses add up to most tokens expected to stand is proposed.

    State: one index for each live sequence, and one for the finished answers of each salt.
    """

    name = "suffix"

    def __init__(self, config: SuffixConfig, min_prob: float) -> None:
        self.config, self.min_prob = config, min_prob
        self.max_tokens = config.k
        self._memories: dict[int, _Memory] = {}
        self._answers: dict[str, NgramIndex] = {}
        self._order: deque[str] = deque()
        """The salt of each finished answer, oldest first."""
        self._cached_tokens = 0

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(k, self.config.k)) for seq, k in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Nothing to do: guesses are judged by the text at the next proposal."""

    def forget(self, seq: Sequence) -> None:
        """Drop the sequence's index, and keep its answer for others of its salt."""
        self._memories.pop(seq.id, None)
        answer = seq.tokens[max(seq.prompt_len, len(seq.tokens) - self.config.cached_tokens) :]
        if not answer or not self.config.cached_requests:
            return
        answers = self._answers.setdefault(seq.salt, NgramIndex())
        answers.extend(answer)
        answers.finish()
        self._order.append(seq.salt)
        self._cached_tokens += len(answer)
        while len(self._order) > self.config.cached_requests or self._cached_tokens > self.config.cached_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        salt = self._order.popleft()
        self._cached_tokens -= self._answers[salt].drop_oldest()
        if not self._answers[salt]:
            del self._answers[salt]

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        if budget < 1:
            return EMPTY
        memory = self._memories.setdefault(seq.id, _Memory())
        memory.own.extend(seq.tokens[len(memory.own) :])
        memory.settle()
        best = self._best(memory, self._answers.get(seq.salt), budget)
        if best is None:
            return EMPTY
        memory.guess, memory.guess_trust = best.likeliest(len(seq.tokens)), best.trust
        if best.expected < self.min_prob:
            return EMPTY
        parents = None if self.config.width == 1 else tuple(best.parents)
        return Draft(tuple(best.tokens), parents, None, self.name, best.expected)

    def _best(self, memory: _Memory, answers: NgramIndex | None, budget: int) -> DraftTree | None:
        """The growth that expects most tokens to stand, over both indexes and all match lengths."""
        best: DraftTree | None = None
        for index, trust in ((memory.own, memory.trust_own), (answers, memory.trust_answers)):
            if index is None:
                continue
            for match, places in self._matches(index, memory.own.text):
                depth = min(budget, self.config.most_tokens(match))
                if depth < 1 or (best is not None and _ceiling(trust, match, len(places), depth) <= best.expected):
                    continue
                limits = TreeLimits(budget, depth, self.config.width, self.min_prob)
                growth = grow(index, places, match, trust, limits)
                if growth.tokens and (best is None or growth.expected > best.expected):
                    best = growth
        return best

    def _matches(self, index: NgramIndex, text: list[Token]) -> Iterator[tuple[int, list[int]]]:
        """Lengths of match that occurred, longest first, each with the places that match so far or farther."""
        found = index.find(text[-self.config.max_depth :], self.config.max_depth, _SCAN)
        for match in sorted(set(found.values()), reverse=True):
            yield match, sorted((place for place, m in found.items() if m >= match), reverse=True)[:_SCAN]


def _ceiling(trust: Confidence, match: int, seen: int, depth: int) -> float:
    """The most that these occurrences of a match could expect of a chain: all agreeing to the end."""
    chance, total = 1.0, 0.0
    for i in range(depth):
        chance *= trust.chance(match + i, claim(match + i, seen, seen))
        total += chance
    return total
