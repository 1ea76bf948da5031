"""Lookups on the device: the model-free drafters for rounds launched before the host knows the last one's tokens.

The device finds the longest match and reads from a table how many tokens to draft after a match of that length. The
host updates the table by how earlier continuations fared, and sees matches and drafts when their round completes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
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
from outrider.drafters.lookup_rounds import Lookup, LookupText, OpenLookups, Seen, UnjudgedRounds
from outrider.drafters.lookup_rules import LookupRules
from outrider.runners.base import Runner
from outrider.runners.text_store import COLUMN, AnswerRing, TextStore

MAX_WATCHED = 4
"""Max sequences that `watch` looks up in a round."""
_GUESSED_ROUNDS = 2
"""`look_up_all` reports guesses in one of this many rounds: to compare them with the text takes the host's time."""
_SPARE_SLOTS = 16
"""Max slots beyond `max_batch`, so that a freed slot is seldom given to another text before its rounds are judged."""
MAX_WRITTEN = 4096
"""Max tokens of texts copied to the device in one round: about as many as the host has time for while a pass runs."""
_MAX_REPEATS, _MAX_REPEATS_OF_ALL = 8, 32
"""Max times that a lookup is repeated with the limits that it was launched with: where they decide this drafter's own
drafts and rows, and where another drafter chooses, which has a draft of its own in any case."""
_MAX_UNJUDGED = _MAX_REPEATS + 2
"""Rounds that are judged together: while a lookup is repeated, new limits would not be used anyway."""


class _Ready(NamedTuple):
    """A sequence whose whole text is on the device."""

    row: int
    """Its row in the view."""
    text: LookupText
    length: int
    round: int
    ahead: int
    """By how much `Sequence.round` grows until the draft made now is observed."""
    place: int
    """1 + its row in the tensors of the state's origin; 0: it is not in them, and the host has its whole text."""


@dataclass(slots=True)
class _LastRound:
    """The last round with a state in which every sequence was looked up: what `repeat` needs of it."""

    lookup: Lookup
    budgets: Budgets
    longest: int
    """Columns of the longest text when it was looked up, plus the most that repeated rounds may have added."""
    repeats: int
    """How many more times it may be repeated: repeats use the limits on the device, not what the host learns since."""
    of_all: bool = False
    """It was launched by `look_up_all`."""


class DeviceLookup(Drafter):
    """Drafts what followed the longest match of a text's end, found on the device.

    With a state, drafts stay on the device, padded to their budgets; without one the host waits for them. The rows of a
    pass are chosen before matches are found, by how many tokens matches lately called for: see `choose_budgets`.
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
        slots = max_batch + min(max_batch, _SPARE_SLOTS)
        self.store = TextStore(
            slots, self.ring, max_batch=max_batch, k=self.k, max_match=self.max_match, device=target.device
        )
        self._texts: dict[int, LookupText] = {}
        self._free = deque(range(slots))
        """Free slots, in the order in which they were freed."""
        self._open, self._unjudged = OpenLookups(), UnjudgedRounds()
        self._figures = MatchFigures(rules, slots, self.k)
        """What was learned from earlier rounds, except those in `_unjudged`."""
        self._rows = np.zeros((slots, len(COLUMN)), dtype=np.int64)
        """[slots, columns], see `COLUMN`: the inputs of each slot's lookups that are kept between rounds."""
        self._answers: deque[tuple[str, list[Token]]] = deque()
        """The salts and tokens of finished answers that are not on the device yet."""
        self._guesses = OpenGuesses()
        self._looked_up = 0
        """The rounds of `look_up_all`, repeated ones included."""
        self._last: _LastRound | None = None
        """None if the last lookup cannot be repeated."""

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
        lookup = self._look_up(view, ready, slots, budgets.room)
        block = lookup.block
        made = self._on_host(block, slots) if view.state is None else self._on_device(block, slots, budgets)
        for each, draft in zip(ready, made, strict=True):
            drafts[each.row] = draft
        if whole and view.state is not None:
            longest = max(each.length + each.text.shift for each in ready)
            self._last = _LastRound(lookup, budgets, longest, _MAX_REPEATS)
        return drafts

    def look_up_all(self, view: RoundView) -> HostCopy | None:
        """Look up every text of a round behind one in flight, for a drafter that chooses from the drafts found.

        Returns the columns of `kernels.lookup.Found`, valid on the device until the next lookup; None if not all texts
        are there. They are reported as guesses now and then, since the round may score other drafts.
        """
        if view.state is None or view.state.origin.tokens is None:
            return None
        ready = self._ready(view, range(len(view.seqs)))
        self._last = None
        if not ready:
            return None
        slots, whole = np.array([each.text.slot for each in ready]), len(ready) == len(view.seqs)
        budgets = Budgets([self.k if whole else 0] * len(ready))
        # even if only some texts are ready: the lookup also appends their new tokens on the device
        lookup = self._look_up(view, ready, slots, budgets.room, self._not_guessed(len(ready)))
        if not whole:
            return None
        longest = max(each.length + each.text.shift for each in ready)
        self._last = _LastRound(lookup, budgets, longest, _MAX_REPEATS_OF_ALL, of_all=True)
        return lookup.block

    def _not_guessed(self, texts: int) -> list[bool]:
        """For a round of `look_up_all`, whether each lookup is left out of the guesses: in all but every
        `_GUESSED_ROUNDS`-th, whatever the round brings, since guesses stand for the others."""
        self._looked_up += 1
        return [self._looked_up % _GUESSED_ROUNDS > 0] * texts

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        last, state, seqs = self._last, view.state, view.seqs
        if last is None or state is None or not last.repeats or not last.lookup.is_of(seqs):
            return None
        texts, slots, rounds = last.lookup.texts, last.lookup.slots, [seq.round for seq in seqs]
        known = all(text.appended >= number for text, number in zip(texts, rounds, strict=True))
        if not known or not last.budgets.cover(self._figures.reach[slots].tolist()):
            return None
        last.longest += self.k + 1  # an upper bound: asking each text for its length takes longer
        block = self.store.look_up_again(len(seqs), last.longest, state)
        if block is None:
            return None
        for text, number in zip(texts, rounds, strict=True):
            text.appended = number + 1
        drafted = self._not_guessed(len(seqs)) if last.of_all else None
        self._open.add(Lookup(block, seqs, texts, slots, [number + 2 for number in rounds], drafted))
        last.repeats -= 1
        self._add_answers()  # for the next lookup: the host has time now
        return block

    def watch(self, view: RoundView) -> None:
        if view.state is not None and view.state.origin.tokens is None:
            return
        self._last = None
        ready = self._ready(view, self._watched(view.seqs))
        if ready:
            self._look_up(view, ready, np.array([each.text.slot for each in ready]), [0] * len(ready))

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        seen = self._open.take(seqs, verdicts) if self._texts else None
        if seen is None:
            return
        self._figures.note_reach(seen.slots, seen.found[:, self.store.columns.wanted])
        if seen.drafted is not None and not all(seen.drafted):
            self._note_guesses(seen.take([row for row, drafted in enumerate(seen.drafted) if not drafted]))
        self._unjudged.add(seen)
        if len(self._unjudged) >= _MAX_UNJUDGED:
            self._judge()

    def take_evidence(self) -> Seq[Evidence]:
        return self._guesses.take()

    def forget(self, seq: Sequence) -> None:
        """Free the sequence's slot, and keep its answer for others of its salt."""
        self._guesses.forget(seq.id)
        if seq.id in self._texts:
            self._free_slot(seq.id)
        if self.ring.size and seq.generated:
            self._answers.append((seq.salt, seq.tokens[max(seq.prompt_len, len(seq.tokens) - self.ring.size) :]))

    def _watched(self, seqs: Seq[Sequence]) -> list[int]:
        """The rows of at most `MAX_WATCHED` sequences, preferring those whose texts are on the device."""
        known = [row for row, seq in enumerate(seqs) if seq.id in self._texts]
        rest = (row for row, seq in enumerate(seqs) if seq.id not in self._texts)
        return sorted(islice(chain(known, rest), MAX_WATCHED))

    def _ready(self, view: RoundView, rows: Iterable[int]) -> list[_Ready]:
        """Copy texts of these rows to the device, up to a round's limit; return those that are there whole."""
        left, rules = MAX_WRITTEN, self.rules
        if self._has_time(view):
            self._judge()
            left -= self._add_answers()
        self._figures.set_batch(len(view.seqs))
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

    def _has_time(self, view: RoundView) -> bool:
        """Whether the host has time before this round for what can wait: not where sequences join."""
        return not view.newcomers

    def _add_answers(self) -> int:
        """Copy finished answers to the device, up to a round's limit; returns the number of their tokens."""
        finished: list[tuple[str, list[Token]]] = []
        written = 0
        while self._answers and written < MAX_WRITTEN:
            finished.append(self._answers.popleft())
            written += len(finished[-1][1])
        if finished:
            self.ring.add_all(finished)
        return written

    def _begin(self, seq: Sequence, asked: Seq[Sequence]) -> LookupText:
        """Assign a slot to a sequence; if none is free, take that of a sequence that is not in this round."""
        if not self._free:
            wanted = {each.id for each in asked}
            self._free_slot(next(seq_id for seq_id in self._texts if seq_id not in wanted))
        base = (-1, *seq.prediction, -1) if self.rules.predicted else ()
        shift = len(base) - seq.prompt_len if base else 0
        if self._unjudged.are_of(self._free[0]):
            self._judge()
        text = self._texts[seq.id] = LookupText(self._free.popleft(), base, shift)
        self._rows[text.slot, : COLUMN.owner] = text.slot, shift, len(base) - 1, len(base) - 1 if base else 0
        self._figures.reset(text.slot)
        return text

    def _free_slot(self, seq_id: int) -> None:
        """Free the slot of a sequence's text."""
        text = self._texts.pop(seq_id)
        self._open.drop(text)
        self._free.append(text.slot)
        if self._last is not None and text in self._last.lookup.texts:
            self._last = None

    def _look_up(
        self,
        view: RoundView,
        ready: Seq[_Ready],
        slots: Integers,
        budgets: Seq[int],
        drafted: Seq[bool] | None = None,
    ) -> Lookup:
        """Launch the lookup of these texts' ends, and keep it to be judged when the round is observed.

        drafted: whether each text is drafted for, else its lookup is reported as a guess; None: where it has a budget.
        """
        seqs, owner, rows = view.seqs, self.ring.owner, self._rows[slots]
        rows[:, COLUMN.owner] = [owner(seqs[each.row].salt) for each in ready]
        rows[:, COLUMN.budget], rows[:, COLUMN.length] = budgets, [each.length for each in ready]
        rows[:, COLUMN.gain] = [each.place for each in ready]
        block = self.store.look_up(rows, self._figures.limits[slots], view.state)
        due = [each.round + each.ahead for each in ready]
        asked = seqs if len(ready) == len(seqs) else [seqs[each.row] for each in ready]
        if drafted is None and not all(budgets):
            drafted = [budget > 0 for budget in budgets]
        lookup = Lookup(block, asked, [each.text for each in ready], slots, due, drafted)
        self._open.add(lookup)
        return lookup

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
        """Wait for the drafts; what is known of such matches says how many tokens each draft expects to be accepted."""
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

    def _judge(self) -> None:
        """Learn from continuations, drafted or not, by comparing them with the tokens of their rounds."""
        if not len(self._unjudged):
            return
        slots, found, tokens = self._unjudged.take()
        columns = self.store.columns
        came, missed = compare(found[:, columns.continuations], tokens)
        matches = found[:, columns.match]
        self._figures.judge(slots, 1 - found[:, columns.source], matches, came, missed, found[:, columns.wanted])
        if self.rules.predicted:
            some = np.flatnonzero(matches)
            self._rows[slots[some], COLUMN.aim] = found[some, columns.distance]  # the last entry of a slot wins

    def _note_guesses(self, seen: Seen) -> None:
        """Report as guesses what would have been drafted where nothing was; without a match, a guess is empty.

        A guess that the round's tokens do not decide is kept until the text does.
        """
        continuations = seen.found[:, self.store.columns.continuations]
        wanted = seen.found[:, self.store.columns.wanted]
        numbers = np.stack([wanted, *compare(continuations, seen.tokens)], 1).tolist()
        judged = zip(seen.seqs, seen.tokens, numbers, strict=True)
        for row, (seq, tokens, (length, right, wrong)) in enumerate(judged):
            if seq.finish is not None:
                continue
            came = len(tokens)
            if wrong or right >= length:
                self._guesses.judge(seq.id, length, min(right, length), came)
            else:
                self._guesses.note(seq, len(seq.tokens) - came, continuations[row, :length].tolist(), came)


def _places(view: RoundView) -> list[int]:
    """`_Ready.place` of each sequence in the view."""
    state = view.state
    if state is None:
        return [0] * len(view.seqs)
    rows = range(len(view.seqs)) if state.rows is None else state.rows
    return [1 + row if isinstance(row, int) else 0 for row in rows]
