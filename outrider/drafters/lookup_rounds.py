"""Lookups on the device whose rounds are in flight, and the outcome of those whose rounds have completed."""

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
"""Max lookups kept until their round is observed: more than there are rounds in flight. Some are never observed."""


@dataclass(slots=True, eq=False)
class LookupText:
    """A sequence whose text is on the device."""

    slot: int
    base: tuple[Token, ...]
    """Tokens before the text in its row: a prediction between two separators, or nothing."""
    shift: int
    """The column of the text's first token, were it there: behind a prediction only the answer is. May be negative."""
    written: int = 0
    """At least so many tokens of its row are on the device; all are if `appended` is the current round or later."""
    appended: int = -1
    """The value of `Sequence.round` up to which the device itself appends committed tokens; -1: it does not."""

    def missing(self, seq: Sequence, most: int) -> list[Token]:
        """The next tokens of the row that the device lacks, at most `most`."""
        first = max(self.written, len(self.base)) - self.shift
        return [*self.base[self.written :], *seq.tokens[first : first + most]][:most]


class Seen(NamedTuple):
    """The outcome of a round in which texts' ends were looked up."""

    seqs: Seq[Sequence]
    slots: Integers
    found: Integers
    """[B, columns], as `kernels.lookup.Found` says."""
    tokens: list[tuple[Token, ...]]
    """The tokens that were committed for each text."""
    drafted: Seq[bool] | None
    """Whether each text was drafted for; None: all were."""

    def take(self, rows: Seq[int]) -> Seen:
        """The same for some of the texts."""
        return Seen(
            [self.seqs[row] for row in rows],
            self.slots[rows],
            self.found[rows],
            [self.tokens[row] for row in rows],
            None if self.drafted is None else [self.drafted[row] for row in rows],
        )


class Lookup(NamedTuple):
    """A lookup of the ends of some texts."""

    block: HostCopy
    seqs: Seq[Sequence]
    texts: Seq[LookupText]
    slots: Integers
    due: list[int]
    """The value of `Sequence.round` of each once the round is observed."""
    drafted: Seq[bool] | None = None
    """Whether each text is drafted for; None: all are."""
    rows: list[int] | None = None
    """The row of the block for each text; None: rows are in the order of the texts."""

    def is_of(self, seqs: Seq[Sequence]) -> bool:
        """Whether it is of just these sequences, in this order."""
        return seqs is self.seqs or (len(seqs) == len(self.seqs) and all(map(is_, self.seqs, seqs)))

    def take(self, at: Seq[int]) -> Lookup:
        """The same for some of the texts."""
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
        """The outcome, given a verdict for each text."""
        found, tokens = self.block.array(), [verdict.tokens for verdict in verdicts]
        return Seen(self.seqs, self.slots, found if self.rows is None else found[self.rows], tokens, self.drafted)


class OpenLookups:
    """Lookups whose rounds are not observed yet, the oldest first."""

    def __init__(self) -> None:
        self._open = deque[Lookup](maxlen=_MAX_OPEN)

    def add(self, lookup: Lookup) -> None:
        self._open.append(lookup)

    def drop(self, text: LookupText) -> None:
        """Remove a text that has lost its slot."""
        for at, lookup in enumerate(self._open):
            if text in lookup.texts:
                self._open[at] = lookup.take([row for row, own in enumerate(lookup.texts) if own is not text])

    def take(self, seqs: Seq[Sequence], verdicts: Seq[Verdict]) -> Seen | None:
        """The outcome of the lookup for the round that these sequences have just completed; None: there was none."""
        rounds, opened = [seq.round for seq in seqs], self._open
        for at in range(len(opened) - 1, -1, -1):  # the newest first: an older one of that round was not used
            seen = _seen(opened[at], seqs, rounds, verdicts)
            if seen is not None:
                for _ in range(at + 1):  # rounds complete in the order of their launch
                    opened.popleft()
                return seen
        return None


def _seen(lookup: Lookup, seqs: Seq[Sequence], rounds: list[int], verdicts: Seq[Verdict]) -> Seen | None:
    """The outcome of a lookup for the sequences that have just completed its round; None if there are none."""
    if lookup.is_of(seqs):  # the usual case
        if lookup.due == rounds:
            return lookup.seen(verdicts)
        if not any(map(eq, lookup.due, rounds)):
            return None
    came = {(seq.id, number): verdict for seq, number, verdict in zip(seqs, rounds, verdicts, strict=True)}
    ends = [came.get((seq.id, due)) for seq, due in zip(lookup.seqs, lookup.due, strict=True)]
    own = [at for at, verdict in enumerate(ends) if verdict is not None]
    return lookup.take(own).seen([verdict for verdict in ends if verdict is not None]) if own else None


class UnjudgedRounds:
    """Completed rounds that nothing was learned from yet."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, seen: Seen) -> None:
        self._seen.append(seen)

    def are_of(self, slot: int) -> bool:
        """Whether any of these rounds looked up a text in this slot."""
        return any(slot in each.slots for each in self._seen)

    def take(self) -> tuple[Integers, Integers, list[tuple[Token, ...]]]:
        """Remove all rounds. Returns their slots, what was found, and the committed tokens, the oldest round first."""
        seen, self._seen = self._seen, []
        tokens = [tokens for each in seen for tokens in each.tokens]
        if len(seen) == 1:
            return seen[0].slots, seen[0].found, tokens
        return np.concatenate([each.slots for each in seen]), np.concatenate([each.found for each in seen]), tokens
