"""The round: schedule, propose, score, verify, commit, emit. Prefill is a round with an empty draft."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

import torch

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import OutriderError, RequestError
from outrider.core.sampling import Token, derive_seeds
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import Drafter, follower
from outrider.drafters.grammar import ForcedFirst
from outrider.engine.events import Event, Live, Outcome, describe, extend, logprobs_of
from outrider.engine.request import CheckedRequest, EngineLimits, Request, validate_request
from outrider.engine.round import InFlightRound, spans_of
from outrider.engine.scheduler import ScheduledSequence, Scheduler
from outrider.engine.stats import Stats, Times
from outrider.engine.text import Detokenizer, TextStream
from outrider.runners.base import Runner
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
    ) -> None:
        limits = limits or EngineLimits()
        self.target, self.drafter, self.verifier, self.tokenizer = target, drafter, verifier, tokenizer
        self._proposer = ForcedFirst(drafter)
        self.eos_ids = frozenset(eos_ids)
        self.scheduler = Scheduler(target, max_batch=limits.max_batch, max_round_tokens=limits.max_round_tokens)
        self.stats = Stats()
        """The figures of every request that has ended, summed."""
        self._live: dict[int, Live] = {}
        self._flights: deque[InFlightRound] = deque()
        """Rounds on their way, the oldest first: two at most."""
        self._landed = 0.0
        """When the last one was through."""
        self._untold: list[Outcome] = []
        """Committed, and not put into words yet."""
        self._ids = count()

    def step(self) -> list[Event]:
        """One round: every sequence in it reads on, and once read moves on by at least one token.

        Where passes are launched and not waited for, a step ends the round in flight and puts what it
        brought into words while the device works on the next: launched behind it where the device
        itself knows how its texts go on, else once it has landed. After a step that was broken off, the
        next one tells what that one had committed.
        """
        if self._untold:
            return self._told()
        self._enqueue(self._follow())
        try:
            self._land()
        except BaseException:  # what did not land is scored again; no round behind it is good without it
            self._flights.clear()
            raise
        if not self._flights:
            self._enqueue(self._launch())
        if not self.target.launches:
            self._land()
        return self._told()

    def _told(self) -> list[Event]:
        """All that was committed, in words."""
        outcomes, self._untold = self._untold, []
        return [self._tell(outcome) for outcome in outcomes]

    def _enqueue(self, flight: InFlightRound | None) -> None:
        if flight is not None:
            self._flights.append(flight)

    def _launch(self) -> InFlightRound | None:
        """Schedule, propose, score: a round on its way. None where there is nothing to do."""
        began = time.perf_counter()
        turns = self.scheduler.next_round(self.drafter.max_tokens)
        for seq in self.scheduler.preempted:
            self._live[seq.id].stats.preemptions += 1
        if not turns:
            return None
        drafting = time.perf_counter()
        drafts = self._propose(turns)
        scoring = time.perf_counter()
        times = Times(draft=scoring - drafting, host=drafting - began, rounds=1)
        flight = InFlightRound(turns, drafts, self.target.score(spans_of(turns, drafts)), scoring, times)
        return self._decide(flight) if self.target.launches else flight

    def _follow(self) -> InFlightRound | None:
        """The next round, launched behind the one in flight; None where the host must hear of that one first."""
        drafter, before = follower(self.drafter), self._flights[0] if len(self._flights) == 1 else None
        if drafter is None or before is None or before.standing is None:
            return None
        rows = [i for i, turn in enumerate(before.turns) if turn.seq.id in self._live]
        turns = self.scheduler.next_behind([before.turns[i] for i in rows], self.drafter.max_tokens)
        if not turns:
            return None
        seqs, standing = [turn.seq for turn in turns], before.standing.take(rows)
        drafts = drafter.follow(seqs, [turn.budget for turn in turns], standing)
        if drafts is None:
            return None
        scoring = time.perf_counter()
        logits = self.target.score_behind(standing, [seq.id for seq in seqs], drafts)
        return self._decide(InFlightRound(turns, drafts, logits, scoring, Times(rounds=1)), standing)

    def _decide(self, flight: InFlightRound, behind: DeviceState | None = None) -> InFlightRound:
        """Launch the choices of a round where they are the target's alone, and where they leave its texts."""
        seqs, drafts = flight.judged
        if seqs:
            flight.decided = self.verifier.decide(
                seqs, drafts, flight.logits, None if behind is None else behind.lengths
            )
        if flight.decided is not None and all(turn.complete and _goes_on(turn.seq) for turn in flight.turns):
            flight.standing = self.target.stand(flight.decided.tokens)
        return flight

    def _land(self) -> None:
        """Verify and commit the oldest round in flight. What was cancelled meanwhile is left out."""
        if not self._flights:
            return
        flight = self._flights.popleft()
        spans = spans_of(flight.turns, flight.drafts)
        verdicts = self.verifier.judge(*flight.judged, flight.logits, flight.decided)
        landed = time.perf_counter()
        flight.times.verify = landed - max(flight.scored, self._landed)
        self._landed = landed
        self._read([span for span in spans if not span.wanted and span.seq_id in self._live])
        outcomes: list[Outcome] = []
        try:
            row = 0
            for span, verdict in zip((s for s in spans if s.wanted), verdicts, strict=True):
                if span.seq_id in self._live:
                    outcomes.append(self._commit(span, verdict, flight.logits[row:], landed))
                row += span.rows
            self._observe(outcomes)
            self._account(flight, landed)
        finally:  # what is committed is told, whatever breaks off the rest
            self._untold += outcomes
            for outcome in outcomes:
                if outcome.live.seq.finish is not None:
                    self._retire(outcome.live)

    def _tell(self, outcome: Outcome) -> Event:
        """Put into words what a round brought a sequence; with its last event go its figures."""
        event = describe(outcome)
        if event.finish is None:
            return event
        self.stats.add(outcome.live.stats)
        return replace(event, stats=outcome.live.stats)

    def submit(self, request: Request | CheckedRequest) -> list[int]:
        """Queue a request; returns a sequence id for each of its n texts. RequestError if it cannot be served."""
        checked = request if isinstance(request, CheckedRequest) else validate_request(request, self.target)
        request, limit = checked.request, checked.limit
        params = request.params
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        ids: list[int] = []
        for seed in derive_seeds(params):
            seq = Sequence(
                id=next(self._ids),
                tokens=list(request.prompt),
                prompt_len=len(request.prompt),
                params=params,
                seed=seed,
                stop_ids=stop_ids,
                limit=limit,
                prediction=request.prediction,
                max_draft=request.max_draft,
                salt=request.salt,
                constraint=None if request.constraint is None else request.constraint.fork(),
            )
            stats = Stats(prompt_tokens=seq.prompt_len, started=time.perf_counter())
            self._live[seq.id] = Live(seq, TextStream(self.tokenizer, request.prompt, params.stop), stats)
            self.scheduler.add(seq)
            ids.append(seq.id)
        return ids

    def cancel(self, seq_id: int) -> Event | None:
        """End a sequence now and free its pages; None where it has already ended."""
        if seq_id not in self._live:
            return None
        live = self._live[seq_id]
        self._untold = [outcome for outcome in self._untold if outcome.live is not live]
        live.seq.finish = "cancelled"
        live.stats.ended = time.perf_counter()
        self._retire(live)
        return self._tell(Outcome(live))

    @property
    def busy(self) -> bool:
        return len(self.scheduler) > 0 or bool(self._untold)

    def alive(self, seq_id: int) -> bool:
        """Whether the sequence has not ended yet, or its end was not told yet."""
        return seq_id in self._live or any(outcome.live.seq.id == seq_id for outcome in self._untold)

    def live(self, seq_id: int) -> Live:
        """A sequence that has not ended. Read only."""
        return self._live[seq_id]

    def check(self) -> None:
        """Raise unless every page is accounted for, and none is in use where nothing runs."""
        self.target.pool.check()
        if not self.busy and (self.target.pool.used or self._live):
            raise OutriderError(f"idle, yet {self.target.pool.used} pages in use and {len(self._live)} texts alive")

    def _propose(self, turns: list[ScheduledSequence]) -> list[Draft]:
        """Ask the drafter; whatever comes back is cut to what may be scored."""
        asked = [turn for turn in turns if turn.budget > 0]
        if not asked:
            return [EMPTY] * len(turns)
        guesses = self._proposer.propose([turn.seq for turn in asked], [turn.budget for turn in asked])
        drafts = {t.seq.id: self._legal(d, t.budget) for t, d in zip(asked, guesses, strict=True)}
        if len(turns) == 1:
            return [self._trim(drafts[turns[0].seq.id])]
        return [drafts.get(turn.seq.id, EMPTY) for turn in turns]

    def _trim(self, draft: Draft) -> Draft:
        """Leave out a last guess that alone would begin a new block of rows: it costs more than it can bring.

        Never one that was sampled: where a drafter stopped because of the token it drew, leaving
        that token out would bias the text.
        """
        spills = self.target.row_block > 1 and len(draft) > 1 and len(draft) % self.target.row_block == 0
        return draft.first_nodes(len(draft) - 1) if spills and draft.probs is None else draft

    def _legal(self, draft: Draft, budget: int) -> Draft:
        if not self.target.scores_trees:
            draft = draft.first_chain()
        vocab = self.target.vocab_size
        legal = len(draft)
        if not draft.known:
            legal = next((i for i, token in enumerate(draft.tokens) if not 0 <= token < vocab), legal)
        return draft.first_nodes(min(budget, legal))

    def _read(self, spans: list[Span]) -> None:
        """Note text that was read but not to its end."""
        for span in spans:
            seq = self._live[span.seq_id].seq
            seq.cached = self.target.keep(span, ())
            self.target.pool.publish(seq.id, seq.tokens, seq.cached)

    def _commit(self, span: Span, verdict: Verdict | RequestError, logits: torch.Tensor, now: float) -> Outcome:
        """Extend the text and roll the cache to what stands. logits [1 + draft, vocab]"""
        live = self._live[span.seq_id]
        seq = live.seq
        if isinstance(verdict, RequestError):
            seq.finish = "error"
            live.stats.ended = now
            return Outcome(live, span.draft, error=verdict)
        count, pieces = extend(seq, verdict.tokens, live.text)
        kept = verdict.tokens[:count]
        seq.cached = self.target.keep(span, verdict.path[: count - 1], trim=not self._flights)
        self.target.pool.publish(seq.id, seq.tokens, seq.cached)
        live.stats.tell(count, now)
        logprobs = logprobs_of(seq, verdict, kept, logits)
        seq.round += 1
        return Outcome(live, span.draft, verdict, kept, pieces, logprobs)

    def _observe(self, outcomes: list[Outcome]) -> None:
        told = [(o.live.seq, o.draft, o.verdict) for o in outcomes if o.verdict is not None]
        if told:
            self._proposer.observe([s for s, _, _ in told], [d for _, d, _ in told], [v for _, _, v in told])

    def _account(self, flight: InFlightRound, landed: float) -> None:
        times = flight.times
        if not self._flights:  # else the device works meanwhile
            times.host += time.perf_counter() - landed
        for turn in flight.turns:
            if turn.seq.id in self._live:
                stats = self._live[turn.seq.id].stats
                stats.shared_tokens += 0 if stats.passes else turn.shared  # not what is found again after a preemption
                stats.passes += 1
                stats.times.add(times if turn.decodes else Times(read=times.total))

    def _retire(self, live: Live) -> None:
        """Free all an ended sequence held."""
        del self._live[live.seq.id]
        self.scheduler.remove(live.seq)
        if live.seq.id in self.target.pool:
            self.target.release(live.seq.id, unpublish=live.seq.finish == "error")
        self._proposer.forget(live.seq)
        if not self._live:  # nobody is left to hear of what is in flight
            self._flights.clear()


def _goes_on(seq: Sequence) -> bool:
    """Whether a text can be followed: nothing the host has to do depends on the round in flight.

    Log-probabilities are read from the device, where they would wait behind the next round.
    """
    return seq.untouched and seq.params.logprobs is None
