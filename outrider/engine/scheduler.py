"""Who takes part in a round, how much text each reads, and how far each may be drafted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from outrider.core.sequence import Sequence
from outrider.runners.base import Runner

_AHEAD, _SOON = 128, 64
"""Pages are reserved for `_AHEAD` tokens ahead, so that block tables seldom change; again, once fewer than `_SOON` are
left."""
_BEYOND = 64
"""The max tokens beyond the end of a text that pages are reserved for: a draft may pass the end."""
_MAX_REPEATS = 16
"""Max rounds in a row that repeat the one before."""


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a round: read `chunk` tokens, then score a draft of up to `budget`."""

    seq: Sequence
    chunk: int
    budget: int

    complete: bool
    """The chunk reaches the end of the text, so that its logits say what follows."""
    shared: int = 0
    """Tokens found in the cache when the sequence was admitted, in this round."""
    room: int = 0
    """Tokens that the text may gain from this round on, whatever the one in flight before it brings."""
    joined: bool = False
    """It joins with this round: all but its last token is read before, behind a round in flight."""

    @property
    def decodes(self) -> bool:
        """All but the last token was read before: the usual case once the prompt is read."""
        return self.complete and self.chunk == 1


class Scheduler:
    """First come, first served. Decoding goes before reading; the newest is preempted when pages run out."""

    def __init__(self, target: Runner, *, max_batch: int, max_round_tokens: int, joins: bool = False) -> None:
        """joins: newcomers may join the round behind one in flight, where the runner lets them."""
        self.target, self.pool = target, target.pool
        self.max_batch, self.max_round_tokens = max_batch, max_round_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.joining: list[ScheduledSequence] = []
        """Newcomers, all of whose texts but the last token is read behind a round in flight: they join the next one."""
        self.preempted: list[Sequence] = []
        """Sequences that lost their pages in the last round; they wait again."""
        self.changes = 0
        """The number of changes of who waits or runs."""
        self.joins = joins

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.joining)

    @property
    def reads_prompts(self) -> bool:
        """Whether a round with none in flight reads prompts."""
        newcomers = bool(self.waiting) and len(self.running) < self.max_batch
        return newcomers or any(seq.pending > 1 for seq in self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a finished or cancelled sequence out. Its pages are the target's to release."""
        self.changes += 1
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        else:
            self.joining = [each for each in self.joining if each.seq is not seq]

    def next_round(self, max_draft: int) -> list[ScheduledSequence]:
        """The sequences of this round, pages reserved. Empty where none is left, or others hold all pages.

        A token for every decoding sequence comes first, whatever a round may read. Of what is left, drafts may
        take half while prompts are being read, else all.
        """
        self.preempted = []
        scheduled: list[ScheduledSequence] = []
        new, self.joining = {each.seq.id: each for each in self.joining}, []
        self.running += [each.seq for each in new.values()]
        decoding = [seq for seq in self.running if seq.pending == 1]
        reading = [seq for seq in self.running if seq.pending > 1]
        drafts = spare = self.max_round_tokens - len(decoding)
        if self.reads_prompts:
            drafts, spare = spare // 2, max(1, spare)
        for seq in (*decoding, *reading):
            decodes = seq.pending == 1
            chunk = 1 if decodes else min(seq.pending, spare)
            if chunk < 1 or seq not in self.running:  # preempted by one before it
                continue
            most = drafts if decodes else spare - chunk
            each = self._schedule(seq, chunk, min(_max_draft(seq, max_draft), most))
            if each is not None:
                if seq.id in new:
                    each.shared, each.joined = new[seq.id].shared, decodes
                scheduled.append(each)
                drafts -= each.budget
                spare -= each.budget + (0 if decodes else chunk)
        scheduled = [each for each in scheduled if each.seq in self.running]
        while self.waiting and len(self.running) < self.max_batch and spare > 0 and not self.preempted:
            each = self._admit(spare)
            if each is None:
                break
            self.running.append(each.seq)
            scheduled.append(each)
            spare -= each.chunk
        return scheduled

    def next_round_after(self, scheduled: list[ScheduledSequence], max_draft: int) -> list[ScheduledSequence]:
        """The sequences of the round behind one in flight, pages reserved for any outcome of it.

        A draft may go beyond the end of its text, where it is cut: so rounds are alike, and can be repeated.
        Empty where the round in flight must complete first: a waiting sequence that cannot join could take part, be it
        in the place of one that is sure to end; all are sure to end; or pages would have to be taken from another.
        """
        ending = [each.seq.room <= 1 for each in scheduled]  # whatever the round brings
        if len(scheduled) != len(self.running) or all(ending) or self.must_drain(any(ending)):
            return []
        self.preempted = []
        behind: list[ScheduledSequence] = []
        short = False
        widest, budget, drafts = min(max_draft, self.target.max_width - 1), 0, self.max_round_tokens - len(scheduled)
        drafts -= len(self.joining)
        for each in scheduled:
            seq, rows = each.seq, each.chunk + each.budget
            room = seq.room - each.budget - 1  # were the whole draft accepted
            if max_draft:
                budget = max(0, min(_max_draft(seq, widest), self.target.context - seq.limit + room - 1, drafts))
            if not self.pool.reserve(seq.id, seq.cached + rows + 1 + budget):
                budget = max(0, min(budget, room - 1))  # nothing beyond the text's end then
                if not self.pool.reserve(seq.id, seq.cached + rows + 1 + budget):
                    return []
            behind.append(ScheduledSequence(seq, 1, budget, True, room=room))
            drafts -= budget
            short = short or self._capacity(seq) < min(seq.limit - room + _SOON, self._last(seq))
        if short:
            self._reserve_ahead(scheduled)
        return [*behind, *self._joined(widest, drafts)]

    def _joined(self, widest: int, drafts: int) -> list[ScheduledSequence]:
        """The newcomers that join now. widest: max tokens drafted for each; drafts: for all."""
        joined, self.joining = self.joining, []
        for each in joined:
            seq = each.seq
            budget = max(0, min(_max_draft(seq, widest), self.target.context - len(seq.tokens) - 1, drafts))
            each.budget = budget if budget and self.pool.reserve(seq.id, len(seq.tokens) + budget) else 0
            drafts -= each.budget
            self.running.append(seq)
        return joined

    def must_drain(self, ends: bool) -> bool:
        """Whether the rounds in flight must complete before another: a sequence could take part that cannot join one.

        ends: a sequence is sure to end with them.
        """
        if any(each.seq.pending > 1 for each in self.joining):  # its text was not read: something failed
            return True
        places = len(self.running) + len(self.joining) < self.max_batch
        return bool(self.waiting) and (ends or places) and not self._can_join()

    def join(self) -> list[ScheduledSequence]:
        """Admit sequences that can join the round after the one in flight; all but the last token must be read now."""
        joined: list[ScheduledSequence] = []
        spare = self.max_round_tokens - len(self.running)
        while self.waiting and len(self.running) + len(self.joining) < self.max_batch and self._can_join(spare):
            each = self._admit(spare)
            if each is None:
                break
            seq, spare = each.seq, spare - each.chunk
            joined.append(ScheduledSequence(seq, 1, 0, True, shared=each.shared, room=seq.room, joined=True))
            self.joining.append(joined[-1])
        self._reserve_ahead(joined)
        return joined

    def _can_join(self, spare: int | None = None) -> bool:
        """Whether the first waiting sequence can join a round behind one in flight: it is new, no option or constraint
        needs its text or logits, and one pass can read its text. spare: tokens that may be read.
        """
        seq = self.waiting[0]
        if not (self.joins and self.target.joins) or seq.generated or seq.reads_text or not seq.plain_logits:
            return False
        spare = self.max_round_tokens - len(self.running) if spare is None else spare
        return len(seq.tokens) <= min(spare, self.pool.free * self.pool.size)

    def repeats(self, scheduled: list[ScheduledSequence], rows: int, *, repeated: bool = False) -> int:
        """How often a round of these may be launched again, behind itself: pages are there, whatever is accepted.

        A text may end meanwhile: what is accepted beyond its end is dropped. rows: the slots that a draft writes, from
        the text's last token on. repeated: the round is itself launched again, behind one in flight.
        """
        most = _MAX_REPEATS
        for each in scheduled:
            gain = each.budget + 1
            length = len(each.seq.tokens) + gain if repeated else each.seq.limit - each.room
            room = min(self._capacity(each.seq) - max(gain, rows), self.target.context - gain) - length
            most = min(most, room // gain)
        return max(0, most)

    def _last(self, seq: Sequence) -> int:
        """Max tokens that pages of a sequence are reserved for ahead of its need."""
        return min(seq.limit + _BEYOND, self.target.context)

    def _capacity(self, seq: Sequence) -> int:
        """Tokens that a sequence has pages for."""
        return len(self.pool.table(seq.id)) * self.pool.size

    def _reserve_ahead(self, scheduled: list[ScheduledSequence]) -> None:
        """Reserve pages of all these sequences for many rounds, now that block tables are sent to the device anyway.

        A round with none launched behind it gives back the pages that it does not need, before others could need them.
        """
        for each in scheduled:
            seq = each.seq
            self.pool.reserve_ahead(seq.id, min(len(seq.tokens) + _AHEAD, self._last(seq)))

    def _schedule(self, seq: Sequence, chunk: int, most: int) -> ScheduledSequence | None:
        complete = chunk == seq.pending
        # A text once read may have a few tokens to read again, where the cache could not be rolled back.
        budget = max(0, min(most, seq.room - 1)) if complete and seq.generated else 0
        if self.pool.reserve(seq.id, seq.cached + chunk + budget):
            return ScheduledSequence(seq, chunk, budget, complete, room=seq.room)
        while not self.pool.reserve(seq.id, seq.cached + chunk):  # a draft is never worth another's pages
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return None
        return ScheduledSequence(seq, chunk, 0, complete, room=seq.room)

    def _admit(self, spare: int) -> ScheduledSequence | None:
        seq = self.waiting[0]
        seq.cached = self.pool.open(seq.id, seq.tokens, seq.salt)
        chunk = min(seq.pending, spare)
        if not self.pool.reserve(seq.id, seq.cached + chunk):
            self.pool.close(seq.id)
            seq.cached = 0
            return None
        self.changes += 1
        self.waiting.popleft()
        return ScheduledSequence(seq, chunk, 0, chunk == seq.pending, shared=seq.cached)

    def _preempt(self, victim: Sequence) -> None:
        """Take the newest sequence's pages. Nothing is lost: its text is read again when there is room."""
        self.target.release(victim.id)
        victim.cached = 0
        self.changes += 1
        self.running.remove(victim)
        self.preempted.append(victim)
        self.waiting.appendleft(victim)


def _max_draft(seq: Sequence, max_draft: int) -> int:
    """Max tokens to draft for a sequence: the drafter's limit, or the request's own."""
    return max_draft if seq.max_draft is None else min(max_draft, seq.max_draft)
