"""Follows the text the caller expects, and finds the way back after a difference."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext
from outrider.drafters.confidence import Confidence, Guess, grade
from outrider.drafters.options import check_options, least_chance

_CLAIMS = (0.4, 0.5, 0.7, 0.8, 0.88, 0.93, 0.95, 0.97)
"""By grade of the tokens followed so far: chance that the next one follows too."""
_START = 4
"""The caller's word counts as this many tokens followed."""
_LONGEST = 16
"""Most tokens compared to tell two ways back apart."""
_TRIED = 8
"""Most places tried on each side of the cursor."""
_NEAR = 16
"""How far from the cursor a single token is enough to go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionConfig:
    """Draft from the text the request says to expect."""

    k: int = 15
    """Most tokens proposed in one round."""
    min_prob: float | None = None
    """Go no further where the chance that the token stands falls below this; auto: 0.25 on a CPU, else 0.1."""

    def __post_init__(self) -> None:
        check_options("prediction", self, k=(1, 256), min_prob=(0.0, 1.0))

    def build(self, setting: DrafterContext) -> Prediction:
        return Prediction(self, least_chance(self.min_prob, setting))


class _Reader:
    """Reads a prediction along with the text that comes.

    `cursor` is the place in the prediction expected to come next; `followed` counts the
    tokens before it that agree with the text, 0 where the cursor is a mere guess.
    """

    def __init__(self, prediction: tuple[Token, ...]) -> None:
        self.prediction = prediction
        self.cursor = 0
        self.followed = _START
        self.trust = Confidence()
        self.answer: list[Token] = []
        self._after: dict[tuple[Token, Token], list[int]] = {}
        """Pair of tokens -> the places that follow it, in order."""
        for place in range(2, len(prediction) + 1):
            self._after.setdefault((prediction[place - 2], prediction[place - 1]), []).append(place)

    def read(self, tokens: Seq[Token]) -> None:
        """Move along with the tokens that came."""
        for token in tokens:
            self.answer.append(token)
            if self.cursor < len(self.prediction):
                came = self.prediction[self.cursor] == token
                self.trust.record(self.followed, _CLAIMS[grade(self.followed)], came)
                if came:
                    self.cursor += 1
                    self.followed += 1
                    continue
            self._find_way_back()

    def guess(self, count: int) -> Guess:
        """The next tokens of the prediction."""
        tokens = self.prediction[self.cursor : self.cursor + count]
        claims = tuple(_CLAIMS[grade(self.followed + i)] for i in range(len(tokens)))
        return Guess(len(self.answer), self.followed, tokens, claims)

    def _find_way_back(self) -> None:
        """Move the cursor behind the longest match of the text's end; of equals, the nearest.

        Where nothing matches, the token is taken to stand for the one at the cursor.
        """
        ways = [(-self._match(place), abs(place - self.cursor), place) for place in self._candidates()]
        if ways:
            match, _, self.cursor = min(ways)
            self.followed = -match
        else:
            self.cursor, self.followed = min(self.cursor + 1, len(self.prediction)), 0

    def _candidates(self) -> Iterator[int]:
        """Places after the text's last two tokens, and near the cursor after its last one."""
        if len(self.answer) >= 2:
            places = self._after.get((self.answer[-2], self.answer[-1]), [])
            nearest = bisect_left(places, self.cursor)
            yield from places[max(0, nearest - _TRIED) : nearest + _TRIED]
        for place in range(max(0, self.cursor - _NEAR), min(self.cursor + _NEAR, len(self.prediction))):
            if self.prediction[place] == self.answer[-1]:
                yield place + 1

    def _match(self, place: int) -> int:
        """How many tokens before `place` agree with the end of the text."""
        match = 0
        most = min(place, len(self.answer), _LONGEST)
        while match < most and self.prediction[place - 1 - match] == self.answer[-1 - match]:
            match += 1
        return match


class Prediction:
    """Drafts the next tokens of `seq.prediction`; nothing where the request has none.

    An edit costs a few tokens, not the rest: after a difference the end of the text is
    looked for in the prediction again. State: one reader for each sequence.
    """

    name = "prediction"
    uses_prediction = True  # a request may bring a prediction only where somebody drafts from it

    def __init__(self, config: PredictionConfig, min_prob: float) -> None:
        self.config, self.min_prob = config, min_prob
        self.max_tokens = config.k
        self._readers: dict[int, _Reader] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(k, self.config.k)) for seq, k in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Nothing to do: the reader moves with the text at the next proposal."""

    def forget(self, seq: Sequence) -> None:
        self._readers.pop(seq.id, None)

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        if budget < 1 or not seq.prediction:
            return EMPTY
        reader = self._readers.get(seq.id)
        if reader is None:
            reader = self._readers[seq.id] = _Reader(seq.prediction)
        reader.read(seq.tokens[seq.prompt_len + len(reader.answer) :])
        guess = reader.guess(budget)
        count, expected = reader.trust.worth(guess, self.min_prob)
        return Draft(guess.tokens[:count], source=self.name, expected=expected) if count else EMPTY
