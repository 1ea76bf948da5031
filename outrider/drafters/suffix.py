"""Repeats what followed the current suffix before, in this text and in finished ones of the same salt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from heapq import heappop, heappush

from outrider.core import EMPTY, Draft, Sequence, Token, Verdict
from outrider.drafters.base import Setting
from outrider.drafters.confidence import Confidence, Guess, claim
from outrider.drafters.occurrences import Occurrences
from outrider.errors import ConfigError

_SCAN = 32
"""Most recent occurrences counted for each run length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Draft what followed the current suffix before, in this text and in earlier answers."""

    k: int = 16
    """Most tokens proposed in one round."""
    factor: float = 2.0
    """Most tokens proposed for each token of the match."""
    min_prob: float = 0.1
    """Go no further where the chance that the token stands falls below this."""
    max_depth: int = 64
    """Most tokens of match and proposal together."""
    width: int = 1
    """Most alternatives proposed for one place; more than 1 proposes trees."""
    cached_requests: int = 10_000
    """Finished answers to draft from, the oldest dropped first; 0 drafts from the text itself only."""
    cached_tokens: int = 262_144
    """Most tokens those answers may have in all."""

    def __post_init__(self) -> None:
        for name, low, high in (("k", 1, 256), ("max_depth", 2, 1024), ("width", 1, 16)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"suffix: {name} must be {low} to {high}, got {getattr(self, name)}")
        for name in ("cached_requests", "cached_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"suffix: {name} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.factor <= 64:
            raise ConfigError(f"suffix: factor must be above 0 and at most 64, got {self.factor}")
        if not 0 <= self.min_prob <= 1:
            raise ConfigError(f"suffix: min_prob must be 0 to 1, got {self.min_prob}")

    def build(self, setting: Setting) -> Suffix:
        return Suffix(self)


@dataclass(slots=True)
class _Memory:
    """What is known of one sequence: where its runs occurred, whom to trust, and the last guess."""

    own: Occurrences = field(default_factory=Occurrences)
    trust: dict[bool, Confidence] = field(default_factory=lambda: {False: Confidence(), True: Confidence()})
    """Apart for guesses from the text itself (False) and from earlier answers (True)."""
    guess: Guess | None = None
    foreign: bool = False
    """Whether the last guess came from earlier answers."""


@dataclass(slots=True)
class _Growth:
    """A guess in the making: nodes in the order they were added, and the tokens expected to stand."""

    match: int
    foreign: bool
    tokens: list[Token] = field(default_factory=list[Token])
    parents: list[int] = field(default_factory=list[int])
    claims: list[float] = field(default_factory=list[float])
    chances: list[float] = field(default_factory=list[float])
    expected: float = 0.0


class Suffix:
    """Suffix decoding over occurrence lists, with a running correction of its own claims.

    For every length of match the continuations are counted; the chance of a token is its
    share of the occurrences, discounted where they are few or the match is short
    (`confidence.claim`) and where such guesses failed in this text (`Confidence`). The
    match whose guesses add up to most expected tokens is proposed.

    State: one index for each live sequence, and one for the finished answers of each salt.
    """

    name = "suffix"

    def __init__(self, config: SuffixConfig) -> None:
        self.config = config
        self.max_tokens = config.k
        self._memories: dict[int, _Memory] = {}
        self._answers: dict[str, Occurrences] = {}
        self._order: deque[str] = deque()
        """The salt of each finished answer, oldest first."""
        self._cached_tokens = 0

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(k, self.config.k)) for seq, k in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Nothing to do: guesses are judged by the text at the next proposal."""

    def forget(self, seq: Sequence) -> None:
        self._memories.pop(seq.id, None)
        answer = seq.tokens[max(seq.prompt_len, len(seq.tokens) - self.config.cached_tokens) :]
        if not answer or not self.config.cached_requests:
            return
        answers = self._answers.setdefault(seq.salt, Occurrences())
        answers.extend(answer)
        answers.finish()
        self._order.append(seq.salt)
        self._cached_tokens += len(answer)
        while len(self._order) > self.config.cached_requests or self._cached_tokens > self.config.cached_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        salt = self._order.popleft()
        answers = self._answers[salt]
        self._cached_tokens -= answers.drop_oldest()
        if not answers:
            del self._answers[salt]

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        if budget < 1:
            return EMPTY
        memory = self._memories.setdefault(seq.id, _Memory())
        memory.own.extend(seq.tokens[len(memory.own) :])
        if memory.guess is not None:
            memory.trust[memory.foreign].settle(memory.guess, seq.tokens)
        best = self._best(memory, self._answers.get(seq.salt), budget)
        memory.guess = None
        if best is None:
            return EMPTY
        memory.guess, memory.foreign = _first_chain(best, len(seq.tokens)), best.foreign
        if best.chances[0] < self.config.min_prob:
            return EMPTY  # kept as a guess, to learn whether it would have stood
        parents = None if self.config.width == 1 else tuple(best.parents)
        return Draft(tuple(best.tokens), parents, None, self.name, best.expected)

    def _best(self, memory: _Memory, answers: Occurrences | None, budget: int) -> _Growth | None:
        """The growth that expects most tokens to stand, over both indexes and all match lengths."""
        best: _Growth | None = None
        for index, foreign in ((memory.own, False), (answers, True)):
            if index is None:
                continue
            trust = memory.trust[foreign]
            for match, places in self._matches(index, memory.own.text):
                limit = min(budget, self.config.max_depth - match, int(self.config.factor * match))
                if limit < 1 or (best is not None and _ceiling(trust, match, limit) <= best.expected):
                    continue
                growth = self._grow(index, places, _Growth(match, foreign), trust, limit, budget)
                if growth.tokens and (best is None or growth.expected > best.expected):
                    best = growth
        return best

    def _matches(self, index: Occurrences, text: list[Token]) -> Iterator[tuple[int, list[int]]]:
        """Match lengths that occurred, longest first, with the places of all at least as long."""
        longest = self.config.max_depth - 1
        found = sorted(index.find(text[-longest:], longest, _SCAN).items(), key=lambda item: (-item[1], -item[0]))
        places: list[int] = []
        for i, (place, match) in enumerate(found):
            places.append(place)
            if i + 1 == len(found) or found[i + 1][1] < match:
                yield match, places

    def _grow(self, index: Occurrences, places: list[int], growth: _Growth, trust: Confidence, limit: int, budget: int) -> _Growth:
        """Add the likeliest node next, until the budget is spent or none left is likely enough."""
        heap: list[tuple[float, int, Token, int, float, tuple[Token, ...], list[int]]] = []

        def open_children(parent: int, chance: float, path: tuple[Token, ...], places: list[int]) -> None:
            groups = index.followers(places, path)
            seen = sum(len(group) for group in groups.values())
            ranked = sorted(groups.items(), key=lambda g: -len(g[1]))[: self.config.width]
            for token, group in ranked:
                match = growth.match + len(path)
                claimed = claim(match, len(group), seen)
                c = chance * trust.chance(match, claimed)
                heappush(heap, (-c, len(growth.tokens) * 16 + len(heap), token, parent, claimed, (*path, token), [p + 1 for p in group]))

        open_children(-1, 1.0, (), places)
        while heap and len(growth.tokens) < budget:
            negative, _, token, parent, claimed, path, rest = heappop(heap)
            if -negative < self.config.min_prob and growth.tokens:
                break
            node = len(growth.tokens)
            growth.tokens.append(token); growth.parents.append(parent); growth.claims.append(claimed); growth.chances.append(-negative)
            growth.expected -= negative
            if len(path) < limit:
                open_children(node, -negative, path, rest)
        return growth


def _ceiling(trust: Confidence, match: int, limit: int) -> float:
    """What a match this long could expect at most: every occurrence agreeing."""
    chance, total = 1.0, 0.0
    for i in range(limit):
        chance *= trust.chance(match + i, 1.0)
        total += chance
    return total


def _first_chain(growth: _Growth, start: int) -> Guess:
    nodes: list[int] = []
    for node, parent in enumerate(growth.parents):
        if parent == (nodes[-1] if nodes else -1):
            nodes.append(node)
    return Guess(start, growth.match, tuple(growth.tokens[n] for n in nodes), tuple(growth.claims[n] for n in nodes))
