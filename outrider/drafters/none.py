"""No drafts: every round brings one token, chosen by the target alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext
from outrider.runners.device_state import DeviceState


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDraftConfig:
    """Never draft: plain decoding."""

    @property
    def max_tokens(self) -> int:
        return 0

    def build(self, setting: DrafterContext) -> NoDraft:
        return NoDraft()


class NoDraft:
    """Proposes nothing and keeps nothing."""

    name = "none"
    max_tokens = 0

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [EMPTY] * len(seqs)

    def follow(self, seqs: Seq[Sequence], budgets: Seq[int], standing: DeviceState) -> list[Draft]:
        return [EMPTY] * len(seqs)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Nothing to learn."""

    def forget(self, seq: Sequence) -> None:
        """Nothing to drop."""
