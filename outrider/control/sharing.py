"""Drafters whose drafts share the rows of a pass: what drafts of each mean length bring.

Rows go to the tokens likeliest to be accepted, of whichever sequence, so a mean length of n brings more tokens than
drafts of n tokens each. Where the drafter's confidences are known, so is which tokens would have had a row at any
shorter mean length: one round tells of all lengths up to its own. So for each length j the growth of the accepted
tokens from j - 1 to j is kept, compared with what survival promises. Confidences are seldom copied to the host, and
mostly in rounds in which texts begin or end; so they tell of growth alone, and all rounds tell of its scale.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

import numpy as np

from outrider.control.acceptance import Floats
from outrider.control.costs import RoundCosts

_FIRST_GAIN = 0.15
"""At first, drafts of n of K tokens are taken to bring 1 + _FIRST_GAIN (1 - n / K) times what survival promises."""
_PART, _MAX_PART = 0.001, 0.2
"""The weight of one draft in a scale, and the max weight of all drafts that are noted together."""
_MIN_FACTOR, _MAX_FACTOR = 0.3, 3.0
"""The bounds of the factor that the scale of rounds moves, since few drafts tell little."""
_GROWTH_WEIGHT, _GROWTH_DECAY = 50.0, 0.999
"""The first growths count as this many accepted tokens; their decay for each draft."""


class _Shared:
    """What is known of the drafts of one drafter, as ratios to what survival promises."""

    def __init__(self, most: int) -> None:
        """most: max tokens of a draft."""
        first = 1 + _FIRST_GAIN * (1 - np.arange(1, most + 1) / most)
        self.scale = float(first[0])
        """At a mean length of 1."""
        growth = first / np.concatenate((first[:1], first[:-1]))
        self._growth = _GROWTH_WEIGHT * np.stack((growth, np.ones(most)))
        """[2, most]: at each length, tokens that were accepted; and that were at the length before, times the growth of
        survival. The first column is not used: its ratio is 1."""

    def factors(self) -> Floats:
        """[most]: at each mean length."""
        return self.scale * (self._growth[0] / self._growth[1]).cumprod()

    def note_scale(self, length: int, ratio: float, drafts: int) -> None:
        part = min(_PART * drafts, _MAX_PART)
        factor = float(self.factors()[length - 1])
        moved = min(max(factor + part * (ratio - factor), _MIN_FACTOR), _MAX_FACTOR)
        self.scale *= moved / factor

    def note_growth(self, accepted: Floats, expected: Floats, drafts: int) -> None:
        """accepted, expected: tokens at mean lengths of 1, 2, ..., up to that of the round, whose factor stays."""
        length, seen = len(accepted), self._growth[:, 1 : len(accepted)]
        before = float(self.factors()[length - 1])
        seen *= _GROWTH_DECAY**drafts
        seen += accepted[1:], accepted[:-1] * expected[1:] / expected[:-1]
        self.scale *= before / float(self.factors()[length - 1])


class Sharing:
    """What is known of each drafter whose drafts share rows."""

    def __init__(self, sharing: frozenset[int], costs: RoundCosts, widths: Seq[int]) -> None:
        """sharing: those drafters, by index. widths: those that passes are padded to."""
        self._sharing, self._known = sharing, dict[int, _Shared]()
        self._costs, self._widths = costs, tuple(widths)

    def factors(self, drafter: int, batch: int, most: int) -> list[float] | None:
        """Factors on the tokens expected of drafts of 1, 2, ... `most` tokens, compared with drafts of one length.

        None: its drafts share nothing.
        """
        if drafter not in self._sharing:
            return None
        shares = _sharing_lengths(batch, most, self._widths, tuple(self._costs.target.packed_rows(batch)))
        known = self._of(drafter, most).factors().tolist()
        return [factor if n in shares else 1.0 for n, factor in enumerate(known, 1)]

    def note(self, drafter: int, length: int, accepted: float, expected: Floats, drafts: int) -> None:
        """Note drafts that shared rows. length: their mean length. accepted: tokens of all drafts.

        expected [max tokens]: the tokens that drafts of 1, 2, ... tokens each should have had accepted.
        """
        promised = float(expected[length - 1])
        if drafter in self._sharing and promised > 0:
            self._of(drafter, len(expected)).note_scale(length, accepted / promised, drafts)

    def note_stated(
        self, drafter: int, length: int, stated: Floats, room: Seq[int], accepted: Seq[int], expected: Floats
    ) -> None:
        """Note a round whose drafts shared rows, and whose confidences are known. length, expected: as of `note`.

        stated [B, W], room, accepted: as of `accepted_by_length`.
        """
        if drafter in self._sharing and length > 1:
            brought = accepted_by_length(stated, room, accepted)[:length]
            self._of(drafter, len(expected)).note_growth(brought, expected[: len(brought)], len(accepted))

    def _of(self, drafter: int, most: int) -> _Shared:
        if drafter not in self._known:
            self._known[drafter] = _Shared(most)
        return self._known[drafter]


def accepted_by_length(stated: Floats, room: Seq[int], accepted: Seq[int]) -> Floats:
    """[W]: the accepted tokens that had been scored if B drafts shared rows at mean lengths of 1, 2, ... W.

    stated [B, W]: the confidence in each token, given those before it, from 0 to 1. room: max tokens of each draft.
    accepted: tokens of each draft. Rows go to tokens in the order of `kernels.share.share_tokens`.
    """
    batch, width = stated.shape
    places = np.arange(width)
    survival = np.where(places < np.asarray(room)[:, None], stated.cumprod(1), -1.0)
    order = np.argsort(-survival.T, axis=None, kind="stable")
    ranks = np.empty(batch * width, dtype=np.int64)
    ranks[order] = np.arange(batch * width)
    came = places < np.asarray(accepted)[:, None]  # [B, W]
    needed = (ranks.reshape(width, batch).T // batch)[came]  # the mean length at which each has a row, less 1
    return np.bincount(needed, minlength=width).cumsum().astype(np.float64)


@lru_cache
def _sharing_lengths(batch: int, most: int, widths: tuple[int, ...], packed: tuple[int, ...]) -> frozenset[int]:
    """Of lengths up to `most`, but for that, those at which drafts share rows: a packed pass takes as many rows, and
    has no more than the pass of that width."""
    return frozenset(
        n
        for n in range(1, most)
        if any(
            batch * (1 + n) <= rows <= next((w for w in widths if w > n), 0) << (batch - 1).bit_length()
            for rows in packed
        )
    )
