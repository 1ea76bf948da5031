"""Lookups on the device that check themselves."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.draft import Draft, Verdict
from outrider.core.sequence import Sequence
from outrider.drafters.device_lookup import DeviceLookup
from outrider.testing.drafters import BrokenContract


class CheckedLookup(DeviceLookup):
    """Compares every draft, once its round is over, with a search of the text that it was made for."""

    drafted = 0

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
            self.drafted += len(draft)
            text = seq.tokens[: len(seq.tokens) - len(verdict.tokens)]
            if seq.finish is None and list(draft.tokens) != continuation(text, self.max_match)[: len(draft)]:
                raise BrokenContract(f"{draft.tokens} drafted after {text}")
        super().observe(seqs, drafts, verdicts)


def continuation(text: list[int], max_match: int) -> list[int]:
    """What followed the most recent of the longest matches of a text's end, repeated."""
    for match in range(max_match, 0, -1):
        for place in range(len(text) - 1, match - 1, -1):
            if text[place - match : place] == text[-match:]:
                return text[place:] * 9
    return []
