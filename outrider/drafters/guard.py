"""Calls a drafter so that its errors cannot harm a text: a failure gives an empty draft, and is counted and logged."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import isfinite
from operator import is_
from types import NoneType
from typing import Any

from torch import Tensor, cat, float32, strided

from outrider.core.device_row import ConfidenceRow, DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import LosslessError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import is_finite, is_int
from outrider.core.sequence import Sequence, SequenceView
from outrider.drafters.base import Drafter, Evidence, RoundView, TargetPass
from outrider.runners.device_state import DeviceState

_log = logging.getLogger("outrider.drafters")
MAX_SUM_ERROR = 0.02
"""How far the sum of a distribution may be from 1: numbers of 8 bits are that coarse."""
_FAILED = object()
"""The result of a call that raised."""
_LOG_SECONDS = 1.0
"""A kind of failure that was logged before is logged again only if nothing was logged for this long."""


class GuardedDrafter:
    """A drafter that cannot fail: where the drafter raises or returns something that is not a draft, there is no draft.

    After an exception the drafter itself must cope with its private state. It is asked again in the next round.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """vocab_size: ids at or beyond it are not passed on."""
        self.drafter, self.vocab_size, self.traits = drafter, vocab_size, drafter.traits
        self.failures: Counter[int] = Counter()
        """The number of failures by sequence id, until `take_failures`."""
        self._kinds: set[str] = set()
        """The kinds of failures logged so far."""
        self._logged_at = -_LOG_SECONDS
        self._views: dict[int, SequenceView] = {}
        """By sequence id, until the sequence is forgotten."""
        self._last: tuple[list[Sequence], tuple[SequenceView, ...]] = [], ()
        """The sequences of the last call, and their views."""

    def propose(self, view: RoundView) -> list[Draft] | None:
        """A well-formed draft for each sequence, at most its budget; None only where the drafter may return it."""
        drafts: Any = self._call("propose", view.seqs, lambda: self._proposed(view), _tensors_of(view.state))
        if drafts is _FAILED:
            return [EMPTY] * len(view.seqs)
        if drafts is None and view.state is not None:
            return None
        if not isinstance(drafts, list) or len(drafts) != len(view.seqs):
            what = "more or fewer drafts than sequences" if isinstance(drafts, list) else f"a {type(drafts).__name__}"
            self._fail(view.seqs, f"propose returned {what}")
            return [EMPTY] * len(view.seqs)
        if view.room is not None and _share_budgets(drafts, view.budgets, view.room):
            return drafts
        return [self._checked(*each) for each in zip(drafts, view.seqs, view.budgets, strict=True)]

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        """As `Drafter.repeat`; None also where the drafter fails: then `propose` is called."""
        made: Any = self._call(
            "repeat", view.seqs, lambda: self.drafter.repeat(self._shown(view), drafts), _tensors_of(view.state)
        )
        if made is None or made is _FAILED:
            return None
        last = drafts[0].tokens
        if not isinstance(made, HostCopy) or not isinstance(last, DeviceRow) or made.tokens is not last.block.tokens:
            self._fail(view.seqs, "repeat returned no tokens at the place of the last ones")
            return None
        return made

    def _proposed(self, view: RoundView) -> object:
        drafts: Any = self.drafter.propose(self._shown(view))
        return [*drafts] if isinstance(drafts, Seq) else drafts

    def process(self, work: TargetPass) -> None:
        shown = [work.scores.logits, *(work.scores.features or ()), *_tensors_of(work.state)]
        own = replace(work, seqs=self._read_only(work.seqs), spans=tuple(work.spans))
        self._call("process", work.seqs, lambda: self.drafter.process(own), shown)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        own = self._read_only(seqs), tuple(drafts), tuple(verdicts)
        self._call("observe", seqs, lambda: self.drafter.observe(*own))

    def watch(self, view: RoundView) -> None:
        self._call("watch", view.seqs, lambda: self.drafter.watch(self._shown(view)))

    def take_evidence(self) -> Seq[Evidence]:
        told: Any = self._call("take_evidence", (), lambda: [*map(Evidence._make, self.drafter.take_evidence())])
        return () if told is _FAILED else [each for each in told if _is_sound(each)]

    def forget(self, seq: Sequence) -> None:
        self._call("forget", [seq], lambda: self.drafter.forget(*self._read_only([seq])))
        self._views.pop(seq.id, None)
        self._last = [], ()

    def take_failures(self, seq_id: int) -> int:
        """The number of failures of the drafter or its members for this sequence; the call resets it."""
        return self.failures.pop(seq_id, 0) + self.drafter.take_failures(seq_id)

    def _shown(self, view: RoundView) -> RoundView:
        room = None if view.room is None else tuple(view.room)
        return RoundView(self._read_only(view.seqs), tuple(view.budgets), view.state, view.compared, room)

    def _read_only(self, seqs: Seq[Sequence]) -> tuple[SequenceView, ...]:
        """The sequences as a drafter gets them: a change raises, and is the drafter's failure."""
        known, views = self._last
        if len(known) != len(seqs) or not all(map(is_, known, seqs)):
            views = tuple(map(self._view, seqs))
            self._last = [*seqs], views
        return views

    def _view(self, seq: Sequence) -> SequenceView:
        if isinstance(seq, SequenceView):  # a mix made it
            return seq
        view = self._views.get(seq.id)
        if view is None or not view.shows(seq):
            view = self._views[seq.id] = SequenceView(seq)
        return view

    def _call(self, method: str, seqs: Seq[Sequence], call: Callable[[], object], shown: Seq[Tensor] = ()) -> object:
        """What a call of the drafter returns; `_FAILED` if it raises. Interrupts such as KeyboardInterrupt propagate.

        LosslessError if it wrote to a tensor in `shown`: the target's own choices may be wrong by now.
        """
        counted = [each for each in shown if not each.is_inference()]  # PyTorch refuses writes to the others itself
        before = [each._version for each in counted]
        try:
            result = call()
        except LosslessError:  # from a member of a mix
            raise
        except Exception as error:  # whatever it is, the texts continue without this drafter
            self._fail(seqs, f"{method} raised {type(error).__name__}", error)
            result = _FAILED
        if [each._version for each in counted] != before:
            raise LosslessError(
                f"drafter {self.traits.name}: {method} wrote to the target's tensors; clone what it changes"
            )
        return result

    def _fail(self, seqs: Seq[Sequence], kind: str, error: Exception | None = None) -> None:
        self.failures.update(seq.id for seq in seqs)
        now = time.monotonic()
        if kind in self._kinds and now - self._logged_at < _LOG_SECONDS:
            return
        self._kinds.add(kind)
        self._logged_at = now
        ids = ", ".join(str(seq.id) for seq in seqs)
        _log.warning("drafter %s: %s; no draft for: %s", self.traits.name, kind, ids, exc_info=error)

    def _checked(self, draft: Any, seq: Sequence, budget: int) -> Draft:
        """The part of a draft that may be scored, where the drafter cannot change it any more."""
        if draft is EMPTY or (_is_sound_chain(draft, budget) and draft.share is None):
            return draft
        draft, problem = _copied(draft)
        problem = problem or draft_problem(draft)
        if problem:
            self._fail([seq], problem)
            return EMPTY
        count = legal_nodes(draft, budget, self.vocab_size)
        if count < len(draft):
            over = count == budget
            self._fail([seq], "a draft is longer than its budget" if over else "a draft names no token of the model")
        return draft.first_nodes(count)


def _tensors_of(state: DeviceState | None) -> list[Tensor]:
    return [] if state is None else state.held


def _is_sound(evidence: Evidence) -> bool:
    return all(map(is_int, evidence)) and 0 <= evidence.accepted <= evidence.length and evidence.length > 0


def _copied(draft: Any) -> tuple[Any, str]:
    """A copy of a draft that its drafter cannot change, and why it could not be copied; empty if it could."""
    if type(draft) is Draft and type(draft.tokens) is tuple and type(draft.parents) in (tuple, NoneType):
        return draft, ""
    if not isinstance(draft, Draft):
        return draft, ""
    try:
        tokens = draft.tokens if _is_row(draft, draft.tokens) else tuple(draft.tokens)
        parents = draft.parents
        parents = parents if parents is None or _is_row(draft, parents) else tuple(parents)
        rest = draft.probs, draft.source, draft.expected, draft.known, draft.confidence, draft.share
        return Draft(tokens, parents, *rest), ""
    except Exception as error:  # its parts are not even sequences
        return draft, f"a draft cannot be read: {type(error).__name__}"


def draft_problem(draft: Any) -> str:
    """What is wrong with a draft; empty where nothing is. Tokens still on a device are not waited for."""
    if not isinstance(draft, Draft):
        return f"a draft is a {type(draft).__name__}"
    try:
        return next((problem for check in _CHECKS if (problem := check(draft))), "")
    except Exception as error:  # its parts are not even sequences
        return f"a draft cannot be read: {type(error).__name__}"


def legal_nodes(draft: Draft, budget: int, vocab_size: int) -> int:
    """How many of a draft's first nodes are within the budget and the vocabulary."""
    count = min(len(draft), budget)
    if _on_device(draft):
        return count
    return next((i for i, token in enumerate(draft.tokens[:count]) if not 0 <= token < vocab_size), count)


def _on_device(draft: Draft) -> bool:
    return _is_row(draft, draft.tokens)


def _is_sound_chain(draft: Any, budget: int) -> bool:
    """Whether a draft is a chain on a device that passes every check: what heads draft in nearly all rounds."""
    return (
        type(draft) is Draft
        and draft.known
        and type(draft.tokens) is DeviceRow
        and len(draft.tokens) <= budget
        and draft.parents is None
        and draft.probs is None
        and type(draft.source) is str
        and type(draft.expected) is float
        and isfinite(draft.expected)
        and (draft.confidence is None or _is_row_of_copy(draft.confidence))
    )


def _share_budgets(drafts: Seq[Any], budgets: Seq[int], room: Seq[int]) -> bool:
    """Whether drafts are sound chains that share the sum of the budgets, none of them longer than its room."""
    return all(
        draft is EMPTY or (_is_sound_chain(draft, most) and draft.share in range(budget + 1) and draft.tokens.padded)
        for draft, budget, most in zip(drafts, budgets, room, strict=True)
    )


def _is_row_of_copy(told: Any) -> bool:
    if type(told) is not ConfidenceRow or type(told.block) is not HostCopy or type(told.row) is not int:
        return False
    block = told.block.tokens
    shape = block.shape
    return len(shape) == 2 and block.is_floating_point() and 0 <= told.row < shape[0]


def _is_row(draft: Draft, values: object) -> bool:
    return draft.known and isinstance(values, DeviceRow)


def _bad_values(draft: Draft) -> str:
    if not _on_device(draft) and not all(map(is_int, draft.tokens)):
        return "a draft's tokens are not ints"
    if not isinstance(draft.source, str):
        return "a draft's source is not a str"
    if draft.share is not None:
        return "a draft has a share of what is not shared, or more than its part"
    return _bad_confidence(draft) if is_finite(draft.expected) else "a draft's expected is not a number"


def _bad_confidence(draft: Draft) -> str:
    told: Any = draft.confidence
    if told is None:
        return ""
    block = told.block.tokens if isinstance(told, ConfidenceRow) else None
    if block is None or block.ndim != 2 or not block.is_floating_point() or not 0 <= told.row < len(block):
        return "a draft's confidence is no row of a block of numbers"
    return ""


def _bad_parents(draft: Draft) -> str:
    parents = draft.parents
    if parents is None:
        return ""
    if len(parents) != len(draft.tokens):
        return "a draft has not as many parents as tokens"
    if _is_row(draft, parents):
        return ""
    if not all(is_int(parent) and -1 <= parent < node for node, parent in enumerate(parents)):
        return "a draft's parents are not before their children"
    twins = not _on_device(draft) and len(set(zip(parents, draft.tokens, strict=True))) < len(parents)
    return "a draft has siblings with the same token" if twins else ""


def _bad_probs(draft: Draft) -> str:
    probs: Any = draft.probs
    if probs is None:
        return ""
    if not isinstance(probs, Tensor) or probs.ndim != 2 or len(probs) != len(draft.tokens) or probs.shape[1] < 1:
        return "a draft's probs are not [tokens, vocabulary]"
    if not len(draft):
        return ""
    if not probs.is_floating_point() or probs.layout != strided:
        return "a draft's probs are not floating-point numbers"
    if not _on_device(draft) and max(draft.tokens, default=-1) >= probs.shape[1]:
        return "a draft has a token beyond its probs"
    *sums, low = cat((probs.sum(-1, dtype=float32), probs.amin()[None].float())).tolist()  # one wait for both
    good = low >= 0 and all(abs(total - 1) < MAX_SUM_ERROR for total in sums)  # not so for NaN
    return "" if good else "a draft's probs are not distributions"


_CHECKS: tuple[Callable[[Draft], str], ...] = (_bad_values, _bad_parents, _bad_probs)
