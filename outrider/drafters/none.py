"""No drafts: every round brings one token, chosen by the target alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core import EMPTY, Draft, Sequence, Verdict
from outrider.drafters.base import Setting
from outrider.target.standing import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDraftConfig:
    """Never draft: plain decoding."""

    @property
    def max_tokens(self) -> int:
        return 0

    def build(self, setting: Setting) -> NoDraft:
        return NoDraft()


class NoDraft:
    """Proposes nothing and keeps nothing."""

    name = "none"
    max_tokens = 0

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [EMPTY] * len(seqs)

    def follow(self, seqs: Seq[Sequence], budgets: Seq[int], standing: Standing) -> list[Draft]:
        return [EMPTY] * len(seqs)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Nothing to learn."""

    def forget(self, seq: Sequence) -> None:
        """Nothing to drop."""
