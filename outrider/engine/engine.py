"""The round: schedule, propose, score, verify, commit, emit. Prefill is a round with an empty draft."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import cast

import torch
from torch import Tensor

from outrider.control.controller import Controller
from outrider.core.draft import Verdict
from outrider.core.errors import OutriderError, RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.drafters.base import Drafter, RoundView, TargetPass
from outrider.engine.accounting import count_round, observe, tell_controller
from outrider.engine.drafting import Drafting
from outrider.engine.events import Event, Live, Outcome, describe, extend, logprobs_of
from outrider.engine.proposal import Proposal
from outrider.engine.request import CheckedRequest, EngineLimits, Request, sequences_of, validate_request
from outrider.engine.round import InFlightRound, spans_of
from outrider.engine.scheduler import ScheduledSequence, Scheduler
from outrider.engine.stats import Stats, Times
from outrider.engine.target_passes import TargetPasses
from outrider.engine.text import Detokenizer, TextStream
from outrider.runners.base import Runner, Scores
from outrider.runners.device_state import DeviceState
from outrider.verify.base import Verifier


class Engine:
    """Moves sequences forward, a round at a time. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        target: Runner,
        drafter: Drafter,
        verifier: Verifier,
        tokenizer: Detokenizer,
        *,
        eos_ids: Iterable[Token] = (),
        limits: EngineLimits | None = None,
        controller: Controller | None = None,
    ) -> None:
        """controller: decides when to draft and how far; None drafts all that the drafter proposes."""
        limits = limits or EngineLimits()
        self.target, self.drafter, self.verifier, self.tokenizer = target, drafter, verifier, tokenizer
        self.drafting = Drafting(drafter, target, controller)
        self._passes = TargetPasses(target, self.drafting)
        self._limits = None if controller is None else controller.costs.limits
        self.eos_ids = frozenset(eos_ids)
        self.scheduler = Scheduler(
            target,
            max_batch=limits.max_batch,
            max_round_tokens=limits.max_round_tokens,
            joins=not self.drafting.traits.taps,
        )
        self.stats = Stats()
        """The figures of every request that has ended, summed."""
        self._live: dict[int, Live] = {}
        self._in_flight: deque[InFlightRound] = deque()
        """Rounds in flight, the oldest first: two at most."""
        self._completed = 0.0
        """When the last round completed."""
        self._told: float | None = None
        """When the times of the round that completes in this step were told; None: none has completed."""
        self._late = 0.0
        """Seconds of the last round's step from then on, where rounds do not overlap. They count as the next round's:
        else what is done for drafts then would seem to take no time."""
        self._outcomes: list[Outcome] = []
        """Outcomes that are committed, and not yet returned as events."""
        self._ids = count()

    def step(self) -> list[Event]:
        """One round: every sequence in it reads on, and once its prompt is read gains at least one token.

        Where passes are launched and not waited for, a step completes the round in flight and turns its
        outcome into events while the device works on the next one. The next round is launched behind the one in
        flight where that one leaves a device state, else once it has completed. After a step that was interrupted,
        the next step returns what it had committed.
        """
        if self._outcomes:
            return self._emit()
        self._told = None
        if len(self._in_flight) == 1:
            self._launch_behind(self._in_flight[0])
        if self._in_flight and self.scheduler.waiting:
            self._read_newcomers(self._in_flight[-1])
        try:
            self._complete()
        except BaseException:  # what did not complete is scored again; rounds behind it are void
            self._in_flight.clear()
            raise
        if not self._in_flight:
            self._enqueue(self._launch())
        if self.target.asynchronous:
            return self._emit()
        self._complete()
        events = self._emit()
        if self._told is not None:
            self._late = time.perf_counter() - self._told
        return events

    def _launch_behind(self, first: InFlightRound) -> None:
        try:
            self._enqueue(self._launch(after=first))
        except BaseException:  # the device may be beyond that round by now: nothing is launched from there
            first.closed, first.repeats = True, 0
            raise

    def _enqueue(self, launched: InFlightRound | None) -> None:
        if launched is not None:
            self._in_flight.append(launched)

    def _launch(self, after: InFlightRound | None = None) -> InFlightRound | None:
        """Schedule, propose, score, decide: launch a round.

        after: the round in flight that this one is launched behind. Returns None where there is nothing to do, or
        the host must know the outcome of that round first.
        """
        if after is not None and after.repeats and (again := self._repeat(after)) is not None:
            return again
        began = time.perf_counter()
        scheduled, state = self._schedule(after)
        if not scheduled:
            return None
        proposing = time.perf_counter()
        proposal = self._propose(scheduled, state)
        if proposal is None:
            return None
        scoring = time.perf_counter()
        times = Times(rounds=1)
        if after is None:  # else the device is busy meanwhile
            times.host, times.draft = proposing - began + self._late, scoring - proposing
            self._late = 0.0
        spans = spans_of(scheduled, proposal.drafts)
        scores = self._passes.score(self.verifier, scheduled, spans, state)
        launched = InFlightRound(scheduled, proposal, spans, scores, scoring, times, behind=after is not None)
        if self.target.asynchronous:
            for each, draft in zip(scheduled, launched.drafts, strict=True):
                each.budget = len(draft.tokens)  # so that the round behind it knows how much room is left for sure
            self._passes.decide(self.verifier, launched, spans)
            if launched.can_be_followed and launched.logprobs is None and not self.drafting.traits.taps:
                launched.repeats = self.scheduler.repeats(scheduled, self.drafting.rows)
                launched.version = self._version
            self.drafting.host.note_launch(time.perf_counter() - began)
        elif scores.choices is not None:
            launched.choices = HostCopy(scores.choices)
        return launched

    def _repeat(self, after: InFlightRound) -> InFlightRound | None:
        """Launch the round in flight once more, behind itself: all that differs is known to the device.

        As `_launch` would launch it, in a fraction of the time. None where anything else may have changed.
        """
        state = after.state
        if state is None or after.version != self._version or not self.target.can_repeat(after.scores, state):
            return None
        seqs, lengths = after.decoding[0], [each.budget for each in after.scheduled]
        ending = [seq.room <= 1 or seq.finish is not None for seq in seqs]  # whatever the round in flight brings
        if all(ending) or self.scheduler.joining or self.scheduler.must_drain(any(ending)):
            return None
        began = time.perf_counter()
        proposal = self.drafting.repeat(after.proposal, RoundView(seqs, lengths, state, False))
        if proposal is None:
            after.repeats = 0
            return None
        scores = self.target.repeat(after.scores)
        scheduled = after.scheduled
        if scheduled[-1].joined:
            scheduled = [replace(each, joined=False) if each.joined else each for each in scheduled]
        launched = InFlightRound(scheduled, proposal, after.spans, scores, began, Times(rounds=1), behind=True)
        launched.choices, launched.state = HostCopy(cast(Tensor, scores.choices)), state
        launched.repeats, launched.version, launched.repeated = after.repeats - 1, after.version, True
        if not launched.repeats:  # it was counted as if every draft were accepted
            launched.repeats = self.scheduler.repeats(scheduled, self.drafting.rows, repeated=True)
        if after.processed:
            self.drafting.process(TargetPass(seqs, after.spans, scores, state))
            launched.processed = True
        return launched

    @property
    def _version(self) -> tuple[int, int]:
        """Changes whenever sequences or pages come or go."""
        return self.scheduler.changes, self.target.pool.changes

    def _schedule(self, after: InFlightRound | None) -> tuple[list[ScheduledSequence], DeviceState | None]:
        """The sequences that take part, and their device state if the round is launched behind one in flight."""
        if after is None:
            scheduled = self.scheduler.next_round(self._max_draft)
            for seq in self.scheduler.preempted:
                self._live[seq.id].stats.preemptions += 1
            return scheduled, None
        if after.state is None or not after.can_be_followed or not self.drafting.plans_ahead:
            return [], None
        rows = [i for i, each in enumerate(after.scheduled) if each.seq.id in self._live]
        scheduled = self.scheduler.next_round_after([after.scheduled[i] for i in rows], self.drafting.max_draft)
        if not scheduled:
            return [], None
        state, new = after.state.take(rows), [each.seq.tokens for each in scheduled[len(rows) :]]
        return scheduled, state.joined(new) if new else state

    @property
    def _max_draft(self) -> int:
        """Max tokens drafted in a round with none in flight: where nobody is asked, prompts have all the room."""
        forces = any(seq.constraint is not None for seq in self.scheduler.running)  # tokens, if nobody is asked
        reads = self.scheduler.reads_prompts and not forces
        return self.drafting.max_draft if reads else self.drafting.traits.max_tokens

    def _read_newcomers(self, last: InFlightRound) -> None:
        """Launch the reading of newcomers' texts behind the last round in flight, which keeps the device busy.

        All but the last token of each is read: the newcomers join the round behind that one.
        """
        if not last.can_be_followed or not self.drafting.plans_ahead:
            return
        seqs = [each.seq for each in self.scheduler.join()]
        spans = [Span(seq.id, seq.cached, tuple(seq.tokens[seq.cached : -1]), wanted=False) for seq in seqs]
        spans = [span for span in spans if span.tokens]
        if not spans:
            return
        self._in_flight[0].disturbed = True
        try:
            last.state = self.target.read(spans, last.state)
        except BaseException:  # what is in the pages is not known
            last.closed, last.repeats = True, 0
            raise
        self._note_read(spans, trim=False)
        if self.drafting.traits.follows_target:
            read = [seq for seq in seqs if seq.id in {span.seq_id for span in spans}]
            nothing = torch.empty(0, self.target.vocab_size, device=self.target.device)
            self.drafting.process(TargetPass(read, spans, Scores(nothing, spans), None))

    def _propose(self, scheduled: list[ScheduledSequence], state: DeviceState | None) -> Proposal | None:
        """A draft for each scheduled sequence; None where the round in flight must complete first."""
        budgets = [each.budget for each in scheduled]
        return self.drafting.propose(RoundView([each.seq for each in scheduled], budgets, state))

    def _complete(self) -> None:
        """Verify and commit the oldest round in flight. Sequences cancelled meanwhile are left out."""
        if not self._in_flight:
            return
        done = self._in_flight.popleft()
        spans = spans_of(done.scheduled, done.drafts) if done.behind else done.spans
        waits = time.perf_counter()
        verdicts = self.verifier.judge(*done.decoding, done.scores.logits, done.choices)
        now = time.perf_counter()
        self.drafting.host.note_wait(now - waits)
        done.times.verify = now - max(done.launched, self._completed)
        self._completed = now
        self._note_read([span for span in spans if not span.wanted and span.seq_id in self._live])
        outcomes: list[Outcome] = []
        try:
            row = 0
            for span, verdict in zip((s for s in spans if s.wanted), verdicts, strict=True):
                if span.seq_id in self._live:
                    outcomes.append(self._commit(span, verdict, done, row))
                row += span.rows
            self._process(done, spans, verdicts)
            observe(self.drafting, done, outcomes)
            behind = self._in_flight[0] if self._in_flight else None
            if behind is None:  # else the device works meanwhile
                self._told = time.perf_counter()
                done.times.host += self._told - self._completed
            tell_controller(self.drafting, done, outcomes, behind)
            count_round(done, self._live)
            if behind is not None and behind.repeats and any(o.live.seq.finish is not None for o in outcomes):
                self._enqueue(self._repeat(behind))  # before they retire: the device has work while others come
        finally:  # what is committed is returned, whatever interrupts the rest
            self._outcomes += outcomes
            for outcome in outcomes:
                if outcome.live.seq.finish is not None:
                    self._retire(outcome.live)

    def _emit(self) -> list[Event]:
        """All that was committed, as events; the last event of a sequence has its figures."""
        outcomes, self._outcomes = self._outcomes, []
        return [describe(each) if each.live.seq.finish is None else self._event(each) for each in outcomes]

    def _event(self, outcome: Outcome) -> Event:
        event = describe(outcome)
        if event.finish is None:
            return event
        self.stats.add(outcome.live.stats)
        return event._replace(stats=outcome.live.stats)

    def submit(self, request: Request | CheckedRequest) -> list[int]:
        """Queue a request; returns a sequence id for each of its n texts. RequestError if it cannot be served."""
        checked = request if isinstance(request, CheckedRequest) else validate_request(request, self.target)
        drafted = self.drafting.traits.max_tokens > 0 and checked.request.max_draft != 0
        seqs = sequences_of(checked, self._ids, self.eos_ids, drafted=drafted)
        for seq in seqs:
            stats = Stats(prompt_tokens=seq.prompt_len, started=time.perf_counter(), limits=self._limits)
            self._live[seq.id] = Live(seq, TextStream(self.tokenizer, checked.request.prompt, seq.params.stop), stats)
            self.scheduler.add(seq)
        return [seq.id for seq in seqs]

    def cancel(self, seq_id: int) -> Event | None:
        """End a sequence now and free its pages; None where it has already ended."""
        if seq_id not in self._live:
            return None
        live = self._live[seq_id]
        self._outcomes = [outcome for outcome in self._outcomes if outcome.live is not live]
        live.seq.finish = "cancelled"
        live.stats.ended = time.perf_counter()
        self._retire(live)
        return self._event(Outcome(live))

    @property
    def busy(self) -> bool:
        return len(self.scheduler) > 0 or bool(self._outcomes)

    def alive(self, seq_id: int) -> bool:
        """Whether the sequence has not ended yet, or the event of its end was not returned yet."""
        return seq_id in self._live or any(outcome.live.seq.id == seq_id for outcome in self._outcomes)

    def live(self, seq_id: int) -> Live:
        """A sequence that has not ended. Read only."""
        return self._live[seq_id]

    def check(self) -> None:
        """Raise unless every page is accounted for, and none is in use where nothing runs."""
        self.target.pool.check()
        if not self.busy and (self.target.pool.used or self._live):
            raise OutriderError(f"idle, yet {self.target.pool.used} pages in use and {len(self._live)} texts alive")

    def _note_read(self, spans: list[Span], *, trim: bool = True) -> None:
        """Note prompts that were read, but not to their end. trim: see `Runner.keep`."""
        for span in spans:
            seq = self._live[span.seq_id].seq
            seq.cached = self.target.keep(span, (), trim=trim)
            self.target.pool.publish(seq.id, seq.tokens, seq.cached)

    def _commit(self, span: Span, verdict: Verdict | RequestError, done: InFlightRound, row: int) -> Outcome:
        """Extend the text and roll the cache back to it. The span's logits begin at `row`."""
        live = self._live[span.seq_id]
        seq = live.seq
        if isinstance(verdict, RequestError):
            seq.finish = "error"
            live.stats.ended = self._completed
            return Outcome(live, span.draft, error=verdict)
        count, pieces = extend(seq, verdict.tokens, live.text)
        kept, path = verdict.tokens[:count], verdict.path[: count - 1]
        seq.cached = self.target.keep(span, path, compacted=done.state is not None, trim=not self._in_flight)
        self.target.pool.publish(seq.id, seq.tokens, seq.cached)
        live.stats.count_tokens(count, self._completed)
        logprobs = ()
        if seq.params.logprobs is not None and done.logprobs is not None:
            logprobs = done.logprobs.of(seq, verdict, kept)
        elif seq.params.logprobs is not None:
            logprobs = logprobs_of(seq.params.logprobs, verdict, kept, done.scores.logits[row : row + span.rows])
        seq.round += 1
        return Outcome(live, span.draft.without_padding(), verdict, kept, pieces, logprobs)

    def _process(self, done: InFlightRound, spans: list[Span], verdicts: list[Verdict | RequestError]) -> None:
        """Show a drafter that follows the target what a round read, where it could not be shown at launch."""
        if done.processed or not self.drafting.traits.follows_target:
            return
        judged = iter(verdicts)
        verdict_of = [next(judged) if span.wanted else None for span in spans]
        live = [i for i, span in enumerate(spans) if span.seq_id in self._live]  # the pages of others may be closed
        rows = [i for i in live if not isinstance(verdict_of[i], RequestError)]
        if not rows:
            return
        scores = done.scores.take(rows)
        state = self.target.advance_to(scores, [each for i in rows if isinstance(each := verdict_of[i], Verdict)])
        seqs = [done.scheduled[i].seq for i in rows]
        self.drafting.process(TargetPass(seqs, [spans[i] for i in rows], scores, state))

    def _retire(self, live: Live) -> None:
        """Free all that an ended sequence holds."""
        del self._live[live.seq.id]
        self.scheduler.remove(live.seq)
        if live.seq.id in self.target.pool:
            self.target.release(live.seq.id, unpublish=live.seq.finish == "error")
        live.stats.decisions = self.drafting.forget(live.seq)
        live.stats.draft_failures += self.drafting.take_failures(live.seq.id)
        if not self._live:  # nobody is left for the rounds in flight
            self._in_flight.clear()
            self.drafting.rest()
