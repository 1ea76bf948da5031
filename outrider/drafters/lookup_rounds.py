"""Lookups on the device whose rounds are not over yet, and what came of those that are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import eq, is_
from typing import NamedTuple

import numpy as np

from outrider.core.draft import Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.confidence import Integers

_MAX_OPEN = 8
"""Lookups that are kept until their round is observed: more than there are rounds in flight. Some never are."""


@dataclass(slots=True, eq=False)
class LookupText:
    """A sequence whose text is on the device."""

    slot: int
    base: tuple[Token, ...]
    """What is before the text in its row."""
    shift: int
    """The column of the text's first token, were all of it there: of a prediction's row only the answer is."""
    written: int = 0
    """How many tokens of its row the device has at least; all of them where `appended` says so."""
    appended: int = -1
    """The round, as `Sequence.round` counts, up to which the device itself has written what came."""

    def missing(self, seq: Sequence, most: int) -> list[Token]:
        """The next tokens that the device lacks."""
        first = max(self.written, len(self.base)) - self.shift
        return [*self.base[self.written :], *seq.tokens[first : first + most]][:most]


class Seen(NamedTuple):
    """What came of a round for which texts' ends were looked up."""

    seqs: Seq[Sequence]
    slots: Integers
    found: Integers
    """[B, columns], as `kernels.lookup.Found` says."""
    tokens: list[tuple[Token, ...]]
    """That were committed of each."""
    drafted: Seq[bool] | None
    """None: all were drafted for."""

    def take(self, rows: Seq[int]) -> Seen:
        """The same of some of the texts."""
        return Seen(
            [self.seqs[row] for row in rows],
            self.slots[rows],
            self.found[rows],
            [self.tokens[row] for row in rows],
            None if self.drafted is None else [self.drafted[row] for row in rows],
        )


class Lookup(NamedTuple):
    """Of the ends of some texts."""

    block: HostCopy
    seqs: Seq[Sequence]
    texts: Seq[LookupText]
    slots: Integers
    due: list[int]
    """The value of `Sequence.round` of each once the round is observed."""
    drafted: Seq[bool] | None = None
    """None: all are drafted for."""
    rows: list[int] | None = None
    """Of the block, for each text; None: all, in their order."""

    def is_of(self, seqs: Seq[Sequence]) -> bool:
        """Whether it is of just these sequences, in this order."""
        return seqs is self.seqs or (len(seqs) == len(self.seqs) and all(map(is_, self.seqs, seqs)))

    def take(self, at: Seq[int]) -> Lookup:
        """The same of some of the texts."""
        return Lookup(
            self.block,
            [self.seqs[i] for i in at],
            [self.texts[i] for i in at],
            self.slots[at],
            [self.due[i] for i in at],
            None if self.drafted is None else [self.drafted[i] for i in at],
            [*at] if self.rows is None else [self.rows[i] for i in at],
        )

    def seen(self, verdicts: Seq[Verdict]) -> Seen:
        """What came of it: a verdict for each text."""
        found, tokens = self.block.array(), [verdict.tokens for verdict in verdicts]
        return Seen(self.seqs, self.slots, found if self.rows is None else found[self.rows], tokens, self.drafted)


class OpenLookups:
    """Lookups whose rounds are not observed yet, the oldest first."""

    def __init__(self) -> None:
        self._open = deque[Lookup](maxlen=_MAX_OPEN)

    def add(self, lookup: Lookup) -> None:
        self._open.append(lookup)

    def drop(self, text: LookupText) -> None:
        """Leave a text out, which has lost its slot."""
        for at, lookup in enumerate(self._open):
            if text in lookup.texts:
                self._open[at] = lookup.take([row for row, own in enumerate(lookup.texts) if own is not text])

    def take(self, seqs: Seq[Sequence], verdicts: Seq[Verdict]) -> Seen | None:
        """What came of the lookup of the round that these sequences have completed; None: there was none."""
        rounds, opened = [seq.round for seq in seqs], self._open
        for at in range(len(opened) - 1, -1, -1):  # the newest first: an older one of that round was not used
            seen = _seen(opened[at], seqs, rounds, verdicts)
            if seen is not None:
                for _ in range(at + 1):  # rounds complete in the order of their launch
                    opened.popleft()
                return seen
        return None


def _seen(lookup: Lookup, seqs: Seq[Sequence], rounds: list[int], verdicts: Seq[Verdict]) -> Seen | None:
    """What came of a lookup, if the round that any of these sequences has completed is its own."""
    if lookup.is_of(seqs):  # as nearly always
        if lookup.due == rounds:
            return lookup.seen(verdicts)
        if not any(map(eq, lookup.due, rounds)):
            return None
    came = {(seq.id, number): verdict for seq, number, verdict in zip(seqs, rounds, verdicts, strict=True)}
    ends = [came.get((seq.id, due)) for seq, due in zip(lookup.seqs, lookup.due, strict=True)]
    own = [at for at, verdict in enumerate(ends) if verdict is not None]
    return lookup.take(own).seen([verdict for verdict in ends if verdict is not None]) if own else None


class UnjudgedRounds:
    """Rounds that are over and that nothing was learned from yet."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, seen: Seen) -> None:
        self._seen.append(seen)

    def are_of(self, slot: int) -> bool:
        """Whether any of them is of this slot."""
        return any(slot in each.slots for each in self._seen)

    def take(self) -> tuple[Integers, Integers, list[tuple[Token, ...]]]:
        """The slots, what was found, and the tokens that came, of all of them one after another, the oldest first."""
        seen, self._seen = self._seen, []
        tokens = [tokens for each in seen for tokens in each.tokens]
        if len(seen) == 1:
            return seen[0].slots, seen[0].found, tokens
        return np.concatenate([each.slots for each in seen]), np.concatenate([each.found for each in seen]), tokens
