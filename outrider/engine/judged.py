"""What came of one draft: the facts that figures are counted from, and that tell where each token came from."""

from __future__ import annotations

from typing import NamedTuple

from outrider.core.draft import Draft, Verdict
from outrider.core.outputs import Provenance

_new = tuple.__new__  # a named tuple of all its fields, in half the time


class JudgedDraft(NamedTuple):
    """What came of a round's draft, which may be empty. Holds no part of the draft, since events are kept for long."""

    source: str
    drafted: int
    depth: int
    """Levels of the draft."""
    accepted: int
    emitted: int
    """One more than accepted, unless a stop cut the text inside the draft."""
    rejected: bool
    round: int = 0
    """The number of the round in its text, from 0."""
    probs: tuple[float, ...] | None = None
    """The drafter's own probability of each accepted token; None where it states none."""

    @staticmethod
    def of(draft: Draft, verdict: Verdict, round_: int = 0) -> JudgedDraft:
        """verdict: what the text kept of it."""
        tokens, path = verdict
        drafted, accepted, emitted = len(draft.tokens), len(path), len(tokens)
        if draft.parents is None:
            depth, rejected = drafted, accepted < drafted and tokens[-1] != draft.tokens[accepted]
        else:
            depth, rejected = max(draft.depths(), default=0), ends_in_rejection(draft, verdict)
        rejected = rejected and emitted > accepted
        return _new(JudgedDraft, (draft.source, drafted, depth, accepted, emitted, rejected, round_, None))

    def provenance(self) -> tuple[Provenance, ...]:
        """Where each token that the round emitted came from."""
        source, drafted, _, accepted, emitted, rejected, round_, probs = self
        if not drafted:
            return (_new(Provenance, ("plain", "", 0, round_, 0, None)),)
        stated = (None,) * accepted if probs is None else probs
        told = [_new(Provenance, ("accepted", source, i, round_, drafted, prob)) for i, prob in enumerate(stated)]
        if emitted > accepted:
            origin = "recovered" if rejected else "bonus"
            told.append(_new(Provenance, (origin, source, accepted, round_, drafted, None)))
        return tuple(told)


def ends_in_rejection(draft: Draft, verdict: Verdict) -> bool:
    """Whether the target's own token is a recovered one: the tree had others in its place.

    Where no token can be chosen after the last accepted one, that one counts as the target's own: no rejection.
    """
    drafted = [draft.tokens[node] for node in draft.children(verdict.path[-1] if verdict.path else -1)]
    return bool(drafted) and verdict.tokens[-1] not in drafted
