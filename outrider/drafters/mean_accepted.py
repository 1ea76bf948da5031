"""The recent mean number of accepted tokens of a drafter's drafts: what its next draft expects."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.draft import Draft, Verdict

_MEMORY = 0.05
"""Weight of a new draft."""


class MeanAccepted:
    """A running mean over drafts that were scored."""

    def __init__(self, start: float) -> None:
        self.value = start

    def note(self, drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        for draft, verdict in zip(drafts, verdicts, strict=True):
            if len(draft):
                self.value += _MEMORY * (verdict.accepted - self.value)
