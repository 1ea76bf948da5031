"""Repeats what followed the current suffix before, in this text and in finished ones of the same salt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import groupby

from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits
from outrider.drafters.confidence import Confidence, Continuation, prior_prob
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.history import read_history
from outrider.drafters.lookup_rules import LookupRules, looks_up_on_device
from outrider.drafters.ngram_index import MAX_INDEXED, NgramIndex
from outrider.drafters.options import check_options, default_min_prob, row_share
from outrider.drafters.tree_builder import DraftTree, TreeLimits, build_chain, build_tree

_MAX_OCCURRENCES = 16
"""Most occurrences counted, the most recent ones."""
_MAX_DEVICE_MATCH = 16
"""The longest match looked for on a device: a longer one counts as that."""
_ANSWERS_RATIO = 0.5
"""At first a continuation from another text counts this much of one from the text itself (measured on chat)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Draft what followed the current suffix before, in this text and in earlier answers."""

    k: int = 15
    """Max tokens proposed in one round."""
    factor: float = 2.0
    """Max tokens proposed for each token of the match."""
    min_prob: float | None = None
    """Stop where a token's probability of acceptance falls below this; auto: 0.25 on a CPU, else 0.1, or in
    larger batches 0.008 a text, 0.5 at most."""
    max_depth: int = 64
    """Max tokens of match and proposal together."""
    width: int = 1
    """Most alternatives proposed for one place; more than 1 proposes trees."""
    cached_requests: int = 10_000
    """Finished answers to draft from, the oldest dropped first; 0 drafts from the text itself only."""
    cached_tokens: int = 262_144
    """Max tokens those answers may have in all."""
    device_tokens: int = 65_536
    """Of those, max tokens where matches are looked for on a CUDA device, which compares with every one of them."""
    history: str = ""
    """File of answers to draft from at the start, made by `outrider train ngram`."""

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
            device_tokens=(0, 1 << 20),
        )

    def draft_limit(self, match: int) -> int:
        """Max tokens to propose after a match of this length: `factor` for each matched token, within `max_depth`."""
        return int(self.factor * min(match, self.max_depth / (1 + self.factor)))

    @property
    def traits(self) -> Traits:
        return Traits(name="suffix", max_tokens=self.k, observes=False)

    def build(self, context: DrafterContext) -> Drafter:
        min_prob, target = default_min_prob(self.min_prob, context), looks_up_on_device(context)
        history = read_history(self.history, context.vocab_size).answers() if self.history else []
        if target is None or self.width > 1:
            return Suffix(self, min_prob, history)
        rules = replace(self.rules(min_prob), history=history, row_share=row_share(self.min_prob))
        return DeviceLookup(rules, target, context.max_batch)

    def rules(self, min_prob: float) -> LookupRules:
        """The rules of lookups on the device in place of `Suffix`: only the last place of the longest match counts."""
        longest = min(_MAX_DEVICE_MATCH, self.max_depth - 1)
        return LookupRules(
            traits=self.traits,
            priors=[prior_prob(match, 1, 1) for match in range(longest + self.k)],
            limits=[min(self.k, self.draft_limit(match)) for match in range(longest + 1)],
            min_prob=min_prob,
            start=(1.0, _ANSWERS_RATIO),
            ring_tokens=min(self.cached_tokens, self.device_tokens),
            ring_answers=self.cached_requests,
        )


@dataclass(slots=True)
class _SuffixState:
    """What is kept of one sequence."""

    index: NgramIndex = field(default_factory=NgramIndex)
    """Index of the text itself."""
    confidence: Confidence = field(default_factory=Confidence)
    """For continuations from the text itself."""
    answers_confidence: Confidence = field(default_factory=lambda: Confidence(_ANSWERS_RATIO))
    """For continuations from finished answers."""
    continuation: Continuation | None = None
    """The last one, proposed or not, until the text judges it."""
    judged_by: Confidence | None = None
    """The confidence that is updated when it is judged."""

    def judge(self) -> None:
        """Judge the last continuation by the text."""
        if self.continuation is not None and self.judged_by is not None:
            self.judged_by.judge(self.continuation, self.index.text)
        self.continuation = self.judged_by = None


class Suffix(Drafter):
    """Suffix decoding over occurrence lists, with a running correction of its probabilities.

    For every length of match the continuations are counted; the probability of a token is its
    share of the occurrences, less where they are few or the match is short
    (`confidence.prior_prob`) and where such continuations failed in this text (`Confidence`). The
    match with the most tokens expected to be accepted is proposed.

    State: one index for each live sequence, one for the finished answers of each salt, and one for the history that
    all share. At most `MAX_INDEXED` tokens of a sequence are indexed a round, and nothing is proposed before all are.
    """

    def __init__(self, config: SuffixConfig, min_prob: float, history: Seq[Seq[Token]] = ()) -> None:
        self.config, self.traits, self.min_prob = config, config.traits, min_prob
        self._build = build_chain if config.width == 1 else build_tree
        self._states: dict[int, _SuffixState] = {}
        self._answers: dict[str, NgramIndex] = {}
        self._order: deque[str] = deque()
        """The salt of each finished answer, oldest first."""
        self._cached_tokens = 0
        self._unindexed: deque[tuple[str, list[Token]]] = deque()
        """Finished answers that are not indexed to their end, with their salts."""
        self._history = NgramIndex()
        """Index of the answers given at the start; these are never dropped."""
        for answer in history:
            self._history.extend(answer)
            self._history.finish()

    def propose(self, view: RoundView) -> list[Draft]:
        self._index_answers()
        return [self._propose(seq, min(k, self.config.k)) for seq, k in zip(view.seqs, view.budgets, strict=True)]

    def forget(self, seq: Sequence) -> None:
        """Drop the sequence's index, and keep its answer for others of its salt."""
        self._states.pop(seq.id, None)
        answer = seq.tokens[max(seq.prompt_len, len(seq.tokens) - self.config.cached_tokens) :]
        if answer and self.config.cached_requests:
            self._unindexed.append((seq.salt, answer))
        self._index_answers()

    def _index_answers(self) -> None:
        """Index finished answers, at most `MAX_INDEXED` tokens a call; what is left is indexed in later rounds."""
        left = MAX_INDEXED
        while self._unindexed and left > 0:
            salt, answer = self._unindexed[0]
            index = self._answers.setdefault(salt, NgramIndex())
            count = min(left, len(answer))
            index.extend(answer[:count])
            del answer[:count]
            left -= count
            if not answer:
                self._unindexed.popleft()
                self._order.append(salt)
                self._cached_tokens += index.finish()
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
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = _SuffixState()
        indexed = len(state.index)
        state.index.extend(seq.tokens[indexed : indexed + MAX_INDEXED])
        if len(state.index) < len(seq.tokens):
            return EMPTY
        state.judge()
        best = self._best(state, (self._answers.get(seq.salt), self._history or None), budget)
        if best is None:
            return EMPTY
        state.continuation, state.judged_by = best.likeliest(len(seq.tokens)), best.confidence
        if best.expected < self.min_prob:
            return EMPTY
        parents = None if self.config.width == 1 else tuple(best.parents)
        return Draft(tuple(best.tokens), parents, None, self.traits.name, best.expected)

    def _best(self, state: _SuffixState, answers: Seq[NgramIndex | None], budget: int) -> DraftTree | None:
        """The tree that expects most tokens to be accepted, over all indexes and all match lengths."""
        best: DraftTree | None = None
        others = ((index, state.answers_confidence) for index in answers)
        for index, confidence in ((state.index, state.confidence), *others):
            if index is None:
                continue
            for match, places in self._matches(index, state.index.text):
                depth = min(budget, self.config.draft_limit(match))
                if depth < 1 or (
                    best is not None and not _can_expect(confidence, match, len(places), depth, best.expected)
                ):
                    continue
                limits = TreeLimits(budget, depth, self.config.width, self.min_prob)
                tree = self._build(index, places, match, confidence, limits)
                if tree.tokens and (best is None or tree.expected > best.expected):
                    best = tree
        return best

    def _matches(self, index: NgramIndex, text: list[Token]) -> Iterator[tuple[int, list[int]]]:
        """The lengths of match that occurred, longest first, each with the places that match at least so far."""
        found = index.find(text[-self.config.max_depth :], self.config.max_depth, _MAX_OCCURRENCES)
        places: list[int] = []
        for match, alike in groupby(sorted(found, key=found.__getitem__, reverse=True), found.__getitem__):
            places = sorted((*places, *alike), reverse=True)[:_MAX_OCCURRENCES]
            yield match, places


def _can_expect(confidence: Confidence, match: int, seen: int, depth: int, tokens: float) -> bool:
    """Whether a chain could expect more than `tokens` tokens if all `seen` occurrences of the match agreed."""
    path, left = 1.0, tokens
    for length in range(match, match + depth):
        path *= confidence.probs(length, seen, seen)[1]
        left -= path
        if left < 0:
            return True
    return False
