"""Lookups on the device: the model-free drafters where rounds are launched before the host knows the last one's tokens.

The device finds the longest match and decides by its length how far to draft, from a table that the host keeps by what
came of earlier continuations. The host sees matches and drafts when their round completes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, Evidence, RoundView
from outrider.drafters.confidence import Integers
from outrider.drafters.evidence import OpenGuesses
from outrider.drafters.lookup_budgets import Budgets, choose_budgets
from outrider.drafters.lookup_figures import MatchFigures, compare
from outrider.drafters.lookup_rules import LookupRules
from outrider.runners.base import Runner
from outrider.runners.text_store import COLUMN, AnswerRing, TextStore

MAX_WATCHED = 4
"""Sequences whose texts are looked at where nobody drafts."""
MAX_WRITTEN = 4096
"""Max tokens of texts brought to the device in one round: about as many as the host has time for while a pass runs."""
_MAX_REPEATS = 8
"""Times that a lookup is repeated with the limits that it was launched with."""


@dataclass(slots=True)
class _Text:
    """A sequence whose text is on the device."""

    slot: int
    base: tuple[Token, ...]
    """What is before the text in its row."""
    shift: int
    """The column of the text's first token, were all of it there: of a prediction's row only the answer is."""
    written: int = 0
    """How many tokens of its row the device has, as far as the host knows."""
    appended: int = -1
    """The round, as `Sequence.round` counts, up to which the device itself has written what came."""
    open: dict[int, tuple[HostCopy, int, bool]] = field(default_factory=dict[int, tuple[HostCopy, int, bool]])
    """By the value of `Sequence.round` once that round is observed: a lookup, its row of it, and if it was drafted."""

    def missing(self, seq: Sequence, most: int) -> list[Token]:
        """The next tokens that the device lacks."""
        first = max(self.written, len(self.base)) - self.shift
        return [*self.base[self.written :], *seq.tokens[first : first + most]][:most]


class _Ready(NamedTuple):
    """A sequence whose text the device has whole."""

    row: int
    """In the view."""
    text: _Text
    length: int
    round: int
    ahead: int
    """Rounds until what is drafted now is observed."""
    place: int
    """1 + where the round in flight leaves it, in the origin of the state; 0: the host knows all of it."""


class _Seen(NamedTuple):
    """What came of a round for which a text's end was looked up."""

    seq: Sequence
    slot: int
    row: int
    """Of the lookup."""
    drafted: bool
    tokens: tuple[Token, ...]
    """That were committed."""


@dataclass(slots=True)
class _LastRound:
    """Of which every sequence was drafted for, behind a round in flight."""

    texts: list[_Text]
    slots: Integers
    budgets: Budgets
    repeats: int = _MAX_REPEATS
    """How often it may be repeated: what the host learns meanwhile is not on the device."""


class DeviceLookup(Drafter):
    """Drafts what followed the longest match of a text's end, found on the device.

    With a state, drafts stay there and are padded to their budget; without one they are waited for, and exact. How many
    rows a round has is known before what is found, so it has as many as matches lately called for: see `Budgets`.
    """

    def __init__(self, rules: LookupRules, target: Runner, max_batch: int) -> None:
        self.k = min(rules.traits.max_tokens, target.max_width - 1)
        self.rules, self.target = rules, target
        self.traits = replace(
            rules.traits,
            max_tokens=self.k,
            drafts_ahead=True,
            drafts_newcomers=True,
            pays_budget=True,
            limits_itself=True,
            observes=True,
            watches=True,
        )
        self.max_match = len(rules.limits) - 1
        self.ring = AnswerRing(rules.ring_tokens, rules.ring_answers, target.device)
        self.ring.add_all((None, answer) for answer in rules.history)
        self.store = TextStore(max_batch, self.ring, k=self.k, max_match=self.max_match, device=target.device)
        self._texts: dict[int, _Text] = {}
        self._free = list(range(max_batch))
        self._figures = MatchFigures(rules, max_batch, self.k)
        self._rows = np.zeros((max_batch, len(COLUMN)), dtype=np.int64)
        """Of each slot, by `COLUMN`, what is the same in all its lookups."""
        self._answers: deque[tuple[str, list[Token]]] = deque()
        """Finished, and not on the device yet."""
        self._guesses = OpenGuesses()
        self._last: _LastRound | None = None
        """None where it cannot be repeated."""

    def propose(self, view: RoundView) -> list[Draft] | None:
        if view.state is not None and view.state.origin.tokens is None:
            return None
        asked = (row for row, budget in enumerate(view.budgets) if budget > 0)
        drafts, ready = [EMPTY] * len(view.seqs), self._ready(view, asked)
        self._last = None
        if not ready:
            return drafts
        slots = np.array([each.text.slot for each in ready])
        most = [min(view.budgets[each.row], self.k) for each in ready]
        budgets, whole = Budgets(most), len(ready) == len(view.seqs)
        if view.state is not None:
            own = view if whole else view.take([each.row for each in ready])
            budgets = choose_budgets(own, most, self._figures.reach[slots].tolist(), self.target)
        block = self._look_up(view, ready, slots, budgets.room)
        made = self._on_host(block, slots) if view.state is None else self._on_device(block, slots, budgets)
        for each, draft in zip(ready, made, strict=True):
            drafts[each.row] = draft
        if whole and view.state is not None:
            self._last = _LastRound([each.text for each in ready], slots, budgets)
        return drafts

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        last, state = self._last, view.state
        if last is None or state is None or not last.repeats or len(last.texts) != len(view.seqs):
            return None
        pairs = [*zip(view.seqs, last.texts, strict=True)]
        known = all(self._texts.get(seq.id) is text and text.appended >= seq.round for seq, text in pairs)
        if not known or not last.budgets.cover(self._figures.reach[last.slots].tolist()):
            return None
        lengths = [len(seq.tokens) + text.shift for seq, text in pairs]
        block = self.store.look_up_again(len(pairs), max(lengths), state)
        if block is None:
            return None
        for at, ((seq, text), length) in enumerate(zip(pairs, lengths, strict=True)):
            text.written, text.appended = length, seq.round + 1
            text.open[seq.round + 2] = block, at, True
        last.repeats -= 1
        return block

    def watch(self, view: RoundView) -> None:
        if view.state is not None and view.state.origin.tokens is None:
            return
        self._last = None
        ready = self._ready(view, self._watched(view.seqs))
        if ready:
            self._look_up(view, ready, np.array([each.text.slot for each in ready]), [0] * len(ready))

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        if not self._texts:
            return
        seen: dict[HostCopy, list[_Seen]] = {}
        for seq, verdict in zip(seqs, verdicts, strict=True):
            text = self._texts.get(seq.id)
            entry = text.open.pop(seq.round, None) if text is not None and text.open else None
            if text is not None and entry is not None:
                block, row, drafted = entry
                seen.setdefault(block, []).append(_Seen(seq, text.slot, row, drafted, verdict.tokens))
        for block, own in seen.items():
            self._judge(block.array()[[each.row for each in own]], own)

    def take_evidence(self) -> Seq[Evidence]:
        return self._guesses.take()

    def forget(self, seq: Sequence) -> None:
        """Free the sequence's slot, and keep its answer for others of its salt."""
        self._guesses.forget(seq.id)
        text = self._texts.pop(seq.id, None)
        if text is not None:
            self._free.append(text.slot)
        if self.ring.size and seq.generated:
            self._answers.append((seq.salt, seq.tokens[max(seq.prompt_len, len(seq.tokens) - self.ring.size) :]))

    def _watched(self, seqs: Seq[Sequence]) -> list[int]:
        """The rows of a few sequences, of those whose texts are on the device if there are any."""
        known = [row for row, seq in enumerate(seqs) if seq.id in self._texts]
        rest = (row for row, seq in enumerate(seqs) if seq.id not in self._texts)
        return sorted(islice(chain(known, rest), MAX_WATCHED))

    def _ready(self, view: RoundView, rows: Iterable[int]) -> list[_Ready]:
        """The texts of these rows that the device has whole; of the others, what a round may write is written."""
        left, rules = MAX_WRITTEN, self.rules
        self._figures.set_batch(len(view.seqs))
        finished: list[tuple[str, list[Token]]] = []
        while self._answers and left > 0:
            finished.append(self._answers.popleft())
            left -= len(finished[-1][1])
        if finished:
            self.ring.add_all(finished)
        ready: list[_Ready] = []
        pieces: list[tuple[int, int, list[Token]]] = []
        places = _places(view)
        for row in rows:
            seq = view.seqs[row]
            if rules.predicted and not seq.prediction:
                continue
            text, tokens, number = self._texts.get(seq.id) or self._begin(seq, view.seqs), len(seq.tokens), seq.round
            length = tokens + text.shift
            if text.appended >= number:
                text.written = length
            if text.written < length and left > 0:
                piece = text.missing(seq, left)
                pieces.append((text.slot, text.written, piece))
                text.written, left = text.written + len(piece), left - len(piece)
            whole, ahead = text.written >= length, 2 if places[row] else 1
            text.appended = number + ahead - 1 if view.state is not None and whole else -1
            if whole:
                ready.append(_Ready(row, text, tokens, number, ahead, places[row]))
        self.store.write(pieces)
        return ready

    def _begin(self, seq: Sequence, asked: Seq[Sequence]) -> _Text:
        """A place on the device for a sequence; where none is free, that of one that is not asked for now."""
        if not self._free:
            wanted = {each.id for each in asked}
            idle = next(seq_id for seq_id in self._texts if seq_id not in wanted)
            self._free.append(self._texts.pop(idle).slot)
        base = (-1, *seq.prediction, -1) if self.rules.predicted else ()
        shift = len(base) - seq.prompt_len if base else 0
        text = self._texts[seq.id] = _Text(self._free.pop(), base, shift)
        self._rows[text.slot, : COLUMN.owner] = text.slot, shift, len(base) - 1, len(base) - 1 if base else 0
        self._figures.reset(text.slot)
        return text

    def _look_up(self, view: RoundView, ready: Seq[_Ready], slots: Integers, budgets: Seq[int]) -> HostCopy:
        """Launch the lookup of these texts' ends, and note it to be judged when the round is observed."""
        seqs, owner, rows = view.seqs, self.ring.owner, self._rows[slots]
        rows[:, COLUMN.owner] = [owner(seqs[each.row].salt) for each in ready]
        rows[:, COLUMN.budget], rows[:, COLUMN.length] = budgets, [each.length for each in ready]
        rows[:, COLUMN.gain] = [each.place for each in ready]
        block = self.store.look_up(rows, self._figures.limits[slots], view.state)
        for at, (each, budget) in enumerate(zip(ready, budgets, strict=True)):
            each.text.open[each.round + each.ahead] = block, at, budget > 0
        return block

    def _on_device(self, block: HostCopy, slots: Integers, budgets: Budgets) -> list[Draft]:
        name, expected = self.traits.name, self._figures.expected[slots].tolist()
        shares = budgets.shares or [None] * len(slots)
        return [
            Draft(
                DeviceRow(block, at, count, padded=True), None, None, name, min(expected[at], float(count)), True, None,
                share,
            )
            if count
            else EMPTY
            for at, (count, share) in enumerate(zip(budgets.room, shares, strict=True))
        ]  # fmt: skip

    def _on_host(self, block: HostCopy, slots: Integers) -> list[Draft]:
        """The drafts themselves; what is known of their matches says how much they expect."""
        found, columns = block.array(), self.store.columns
        self._figures.reach[slots] = found[:, columns.wanted]
        tokens = found[:, columns.drafts]
        counts = (tokens >= 0).sum(1)
        kinds, matches = 1 - found[:, columns.source], found[:, columns.match]
        expected = self._figures.worth(slots, kinds, matches, counts).tolist()
        return [
            Draft(tuple(tokens[row, :count].tolist()), source=self.traits.name, expected=expected[row])
            if count
            else EMPTY
            for row, count in enumerate(counts.tolist())
        ]

    def _judge(self, found: Integers, seen: Seq[_Seen]) -> None:
        """Learn from continuations, drafted or not: the tokens of their round say what they were worth."""
        columns, slots = self.store.columns, np.array([each.slot for each in seen])
        matches, wanted, continuations = (
            found[:, columns.match],
            found[:, columns.wanted],
            found[:, columns.continuations],
        )
        came, missed = compare(continuations, [each.tokens for each in seen])
        self._note_guesses(seen, continuations, wanted, came, missed)
        kinds, some = 1 - found[:, columns.source], np.flatnonzero(matches)
        self._figures.judge(slots, kinds, matches, came, missed, wanted)
        if self.rules.predicted:
            self._rows[slots[some], COLUMN.aim] = found[some, columns.distance]

    def _note_guesses(
        self, seen: Seq[_Seen], continuations: Integers, wanted: Integers, came: Integers, missed: Integers
    ) -> None:
        """Tell what would have been drafted, where nothing was: nothing found is a draft of nothing.

        Where the tokens of the round do not judge it, it is kept until the text does.
        """
        judged = zip(seen, wanted.tolist(), came.tolist(), missed.tolist(), strict=True)
        for row, (each, length, right, wrong) in enumerate(judged):
            if each.drafted or each.seq.finish is not None:
                continue
            if wrong or right >= length:
                self._guesses.judge(each.seq.id, length, min(right, length))
            else:
                tokens, start = continuations[row, :length].tolist(), len(each.seq.tokens) - len(each.tokens)
                self._guesses.note(each.seq, start, tokens)


def _places(view: RoundView) -> list[int]:
    """As `_Ready.place`, of every sequence."""
    state = view.state
    if state is None:
        return [0] * len(view.seqs)
    rows = range(len(view.seqs)) if state.rows is None else state.rows
    return [1 + row if isinstance(row, int) else 0 for row in rows]
