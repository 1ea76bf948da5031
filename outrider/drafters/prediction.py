"""Drafts the text that the caller expects, and finds its place again after a difference."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits
from outrider.drafters.confidence import Confidence, Continuation, grade
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.lookup_rules import LookupRules, looks_up_on_device
from outrider.drafters.ngram_index import MAX_INDEXED
from outrider.drafters.options import check_options, default_min_prob, row_share

_FOLLOW_PROBS = (0.4, 0.5, 0.7, 0.8, 0.88, 0.93, 0.95, 0.97)
"""By grade of the number of tokens followed so far: probability that the next one follows too."""
_START_FOLLOWED = 4
"""At first the prediction counts as followed for this many tokens."""
_MAX_COMPARED = 16
"""Max tokens compared to choose between two places."""
_MAX_PLACES = 8
"""Max places tried on each side of the cursor."""
_MAX_ALIGNED = 256
"""Max tokens aligned in one round: after rounds without drafts there may be many."""
_NEAR = 16
"""How far from the cursor a single equal token is enough to continue from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionConfig:
    """Draft from the text that the request expects."""

    k: int = 15
    """Max tokens proposed in one round."""
    min_prob: float | None = None
    """Stop where a token's probability of acceptance falls below this; auto: 0.25 on a CPU, else 0.1, or in
    larger batches 0.008 a text, 0.5 at most."""

    def __post_init__(self) -> None:
        check_options("prediction", self, k=(1, 256), min_prob=(0.0, 1.0))

    @property
    def traits(self) -> Traits:
        return Traits(name="prediction", max_tokens=self.k, observes=False, uses_prediction=True, needs_prediction=True)

    def build(self, context: DrafterContext) -> Drafter:
        min_prob, target = default_min_prob(self.min_prob, context), looks_up_on_device(context)
        if target is None:
            return Prediction(self, min_prob)
        return DeviceLookup(
            replace(self.rules(min_prob), row_share=row_share(self.min_prob)), target, context.max_batch
        )

    def rules(self, min_prob: float) -> LookupRules:
        """The rules of lookups on the device in place of `Prediction`: after a difference, the match decides."""
        return LookupRules(
            traits=self.traits,
            priors=[_FOLLOW_PROBS[grade(match)] for match in range(_MAX_COMPARED + self.k)],
            limits=[0, *[self.k] * _MAX_COMPARED],
            min_prob=min_prob,
            predicted=True,
        )


class _PairIndex:
    """Where each pair of tokens is in a prediction. Sequences of the same prediction share it."""

    def __init__(self, prediction: tuple[Token, ...]) -> None:
        self.prediction = prediction
        self._places: dict[tuple[Token, Token], list[int]] = {}
        """Pair of tokens -> the places that follow it, in order."""
        self._indexed = 1
        """The places up to here are in the index."""

    def grow(self) -> None:
        """Index the next tokens, a bounded number."""
        begin, self._indexed = self._indexed, min(self._indexed + MAX_INDEXED, len(self.prediction))
        for place in range(begin + 1, self._indexed + 1):
            pair = (self.prediction[place - 2], self.prediction[place - 1])
            self._places.setdefault(pair, []).append(place)

    def nearest(self, pair: tuple[Token, Token], cursor: int) -> list[int]:
        """Places that follow this pair, those nearest to the cursor on each side."""
        places = self._places.get(pair, [])
        after = bisect_left(places, cursor)
        return places[max(0, after - _MAX_PLACES) : after + _MAX_PLACES]


class _Alignment:
    """Where an answer is in its prediction.

    `cursor` is the place in the prediction expected to come next; `followed` counts the
    tokens before it that agree with the answer, 0 where none is known to.
    """

    def __init__(self, index: _PairIndex) -> None:
        self.index, self.prediction = index, index.prediction
        self.cursor = 0
        self.followed = _START_FOLLOWED
        self.confidence = Confidence()
        self.answer: list[Token] = []

    def extend(self, tokens: Seq[Token]) -> None:
        """Move the cursor along with the tokens that the answer has gained: the last `_MAX_ALIGNED` of them at most."""
        skipped = max(0, len(tokens) - _MAX_ALIGNED)
        self.answer += tokens[:skipped]
        for token in tokens[skipped:]:
            self.answer.append(token)
            if self.cursor < len(self.prediction):
                came = self.prediction[self.cursor] == token
                self.confidence.record(self.followed, _FOLLOW_PROBS[grade(self.followed)], came)
                if came:
                    self.cursor += 1
                    self.followed += 1
                    continue
            self._realign()

    def continuation(self, count: int) -> Continuation:
        """The next tokens of the prediction."""
        tokens = self.prediction[self.cursor : self.cursor + count]
        priors = tuple(_FOLLOW_PROBS[grade(self.followed + i)] for i in range(len(tokens)))
        return Continuation(len(self.answer), self.followed, tokens, priors)

    def _realign(self) -> None:
        """Move the cursor behind the longest match of the answer's end; of equals, the nearest.

        Where nothing matches, the token is taken to replace the one at the cursor.
        """
        found = [(-self._match(place), abs(place - self.cursor), place) for place in self._candidates()]
        if found:
            match, _, self.cursor = min(found)
            self.followed = -match
        else:
            self.cursor, self.followed = min(self.cursor + 1, len(self.prediction)), 0

    def _candidates(self) -> Iterator[int]:
        """Places after the answer's last two tokens, and near the cursor after its last one."""
        if len(self.answer) >= 2:
            yield from self.index.nearest((self.answer[-2], self.answer[-1]), self.cursor)
        for place in range(max(0, self.cursor - _NEAR), min(self.cursor + _NEAR, len(self.prediction))):
            if self.prediction[place] == self.answer[-1]:
                yield place + 1

    def _match(self, place: int) -> int:
        """How many tokens before `place` agree with the end of the answer."""
        match = 0
        most = min(place, len(self.answer), _MAX_COMPARED)
        while match < most and self.prediction[place - 1 - match] == self.answer[-1 - match]:
            match += 1
        return match


class Prediction(Drafter):
    """Drafts the next tokens of `seq.prediction`; nothing where the request has none.

    An edit costs a few tokens, not the rest: after a difference the end of the answer is
    looked for in the prediction again, as far as that is indexed: at most `MAX_INDEXED` more
    tokens of it a round. State: an index for each prediction, an alignment for each sequence.
    """

    def __init__(self, config: PredictionConfig, min_prob: float) -> None:
        self.traits, self.min_prob = config.traits, min_prob
        self._alignments: dict[int, _Alignment] = {}
        self._indexes: WeakValueDictionary[int, _PairIndex] = WeakValueDictionary()
        """By `id` of the prediction, which its index keeps alive; the alignments keep the indexes alive."""

    def propose(self, view: RoundView) -> list[Draft]:
        return [self._propose(seq, budget) for seq, budget in zip(view.seqs, view.budgets, strict=True)]

    def forget(self, seq: Sequence) -> None:
        self._alignments.pop(seq.id, None)

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        if budget < 1 or not seq.prediction:
            return EMPTY
        alignment = self._alignments.get(seq.id)
        if alignment is None:
            alignment = self._alignments[seq.id] = _Alignment(self._index(seq.prediction))
        alignment.index.grow()
        alignment.extend(seq.tokens[seq.prompt_len + len(alignment.answer) :])
        continuation = alignment.continuation(min(budget, self.traits.max_tokens))
        count, expected = alignment.confidence.expected_accepted(continuation, self.min_prob)
        return Draft(continuation.tokens[:count], source=self.traits.name, expected=expected) if count else EMPTY

    def _index(self, prediction: tuple[Token, ...]) -> _PairIndex:
        index = self._indexes.get(id(prediction))
        if index is None:
            index = self._indexes[id(prediction)] = _PairIndex(prediction)
        return index
