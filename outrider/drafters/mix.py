"""Several drafters: each round and each sequence, the draft that expects most wins."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import (
    Drafter,
    DrafterConfig,
    DrafterContext,
    ModelLoaded,
    is_dear,
    models_loaded,
    most_drafted,
)
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.drafters.suffix import SuffixConfig

_PRIOR = 8.0
"""A member's ratio of tokens that stood to tokens expected starts at 1, with this weight."""
_DRAFTS = 64
"""Running figures remember about this many drafts."""
_KEEP = 1 - 1 / _DRAFTS


def _default_members() -> tuple[DrafterConfig, ...]:
    return (SuffixConfig(), PromptLookupConfig(), PredictionConfig())


@dataclass(frozen=True, slots=True, kw_only=True)
class MixConfig:
    """Ask several drafters and take the draft that expects most tokens to stand."""

    of: tuple[DrafterConfig, ...] = field(default_factory=_default_members)
    """The members: `mix:of=suffix+prediction`, or just `suffix+prediction`."""

    def __post_init__(self) -> None:
        if not self.of:
            raise ConfigError("mix: of names no drafter; for example mix:of=suffix+prediction")

    @property
    def loads(self) -> tuple[ModelLoaded, ...]:
        return tuple(each for config in self.of for each in models_loaded(config))

    @property
    def max_tokens(self) -> int | None:
        each = [most_drafted(config) for config in self.of]
        return None if None in each else max(most for most in each if most is not None)

    def build(self, setting: DrafterContext) -> Mix:
        return Mix([config.build(setting) for config in self.of])


@dataclass(slots=True)
class _Member:
    """A drafter, and how its drafts have fared. Drafts that did not win are judged too, by the text that came."""

    drafter: Drafter
    delivered: float
    """Running mean of the tokens that stood of each draft; starts at the most it could be."""
    judged: int = 4
    """How many drafts that mean is of; its start counts as four."""
    stood: float = _PRIOR
    expected: float = _PRIOR
    open: dict[int, tuple[int, Draft]] = field(default_factory=dict[int, tuple[int, Draft]])
    """By sequence: a draft the text has not decided yet, and where it starts."""

    def value(self, draft: Draft) -> float:
        """How many of its tokens should stand, going by what became of earlier claims."""
        return draft.expected * self.stood / self.expected

    def remember(self, seq: Sequence, draft: Draft) -> None:
        """Keep a draft to be judged, unless an earlier one is still open."""
        if seq.id not in self.open:
            self.open[seq.id] = (len(seq.tokens), replace(draft, probs=None))

    def settle(self, seq: Sequence) -> None:
        """Judge the open draft, if the text decides it by now."""
        if seq.id not in self.open:
            return
        start, draft = self.open[seq.id]
        stood = _stood(draft, seq.tokens[start:])
        if stood is not None:
            del self.open[seq.id]
            self.stood = self.stood * _KEEP + stood
            self.expected = self.expected * _KEEP + draft.expected
            self.judged += 1
            self.delivered += (stood - self.delivered) / min(self.judged, _DRAFTS)


class Mix:
    """The best draft of its members wins; `source` stays the winner's name.

    Cheap members are asked first, for every sequence. A dear one (`base.is_dear`) is asked
    only for sequences where the best draft so far expects less than that member has
    delivered on average; it starts with the best it could deliver, so that it is tried.
    A draft that states the law it was sampled from is never dropped for another: choosing
    by what was sampled would bias the output. `observe` tells the members whose draft did
    not win of an empty draft and of all the tokens committed.
    """

    aliases = ("mix",)

    def __init__(self, drafters: Seq[Drafter]) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self.members = [_Member(drafter, float(drafter.max_tokens)) for drafter in sorted(drafters, key=is_dear)]
        self.max_tokens = max(drafter.max_tokens for drafter in drafters)
        self.dear = all(is_dear(drafter) for drafter in drafters)
        self.uses_prediction = any(getattr(drafter, "uses_prediction", False) for drafter in drafters)
        self._winners: dict[int, _Member] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        best = [EMPTY] * len(seqs)
        values = [0.0] * len(seqs)
        for seq in seqs:
            self._winners.pop(seq.id, None)
        for member in self.members:
            asked = [i for i, k in enumerate(budgets) if k > 0 and self._asks(member, best[i], values[i])]
            if not asked:
                continue
            drafts = member.drafter.propose([seqs[i] for i in asked], [budgets[i] for i in asked])
            for i, draft in zip(asked, drafts, strict=True):
                if not draft:
                    continue
                member.remember(seqs[i], draft)
                value = member.value(draft)
                if draft.probs is not None or not best[i] or value > values[i]:
                    best[i], values[i] = draft, value
                    self._winners[seqs[i].id] = member
        return best

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        for member in self.members:
            told: list[tuple[Draft, Verdict]] = []
            for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
                member.settle(seq)
                won = self._winners.get(seq.id) is member
                told.append((draft, verdict) if won else (EMPTY, Verdict(verdict.tokens)))
            member.drafter.observe(seqs, [draft for draft, _ in told], [verdict for _, verdict in told])

    def forget(self, seq: Sequence) -> None:
        self._winners.pop(seq.id, None)
        for member in self.members:
            member.open.pop(seq.id, None)
            member.drafter.forget(seq)

    def _asks(self, member: _Member, best: Draft, value: float) -> bool:
        """Whether this member is asked where a draft of this value has been made."""
        if best.probs is not None:
            return False
        return not is_dear(member.drafter) or value < member.delivered


def _stood(draft: Draft, text: Seq[Token]) -> int | None:
    """How many tokens of a draft came true; None where the text does not tell yet."""
    children = draft.children(-1)
    for stood, token in enumerate(text):
        node = next((child for child in children if draft.tokens[child] == token), None)
        if node is None:
            return stood
        children = draft.children(node)
        if not children:
            return stood + 1
    return None
