"""The round: schedule, propose, score, verify, commit, emit. Prefill is a round with an empty draft."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from outrider.core import (
    EMPTY,
    Constraint,
    Draft,
    SamplingParams,
    Sequence,
    Span,
    Token,
    Verdict,
    check_token_ids,
    derive_seeds,
    is_whole,
)
from outrider.drafters.base import Drafter
from outrider.drafters.grammar import ForcedFirst
from outrider.engine.events import Event, Live, Outcome, describe, extend, logprobs_of
from outrider.engine.scheduler import Scheduler, Turn
from outrider.engine.stats import Stats, Times
from outrider.engine.text import Decoder as TokenDecoder
from outrider.engine.text import TextStream
from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.target.base import Target
from outrider.verify.base import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asks for: a prompt, how to choose, and what it expects to hear."""

    prompt: tuple[Token, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    prediction: tuple[Token, ...] = ()
    """Text the answer is expected to hold; drafted from, never forced."""
    max_draft: int | None = None
    """Most tokens drafted a round; 0 turns speculation off for this request."""
    salt: str = ""
    """Caches are never shared between requests of different salt."""
    constraint: Constraint | None = None
    """What the answer may say; each of the n texts gets a copy of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one round takes on."""

    max_batch: int = 8
    """Most sequences in one round."""
    max_round_tokens: int = 512
    """Most tokens read in one pass; longer prompts are read in several."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_round_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True)
class Flight:
    """A round on its way: who takes part, and the logits that will decide."""

    turns: list[Turn]
    spans: list[Span]
    logits: torch.Tensor
    scored: float
    """When scoring began."""
    times: Times


class Engine:
    """Moves sequences forward, a round at a time. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        tokenizer: TokenDecoder,
        *,
        eos_ids: Iterable[Token] = (),
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self.target, self.drafter, self.verifier, self.tokenizer = target, drafter, verifier, tokenizer
        self._proposer = ForcedFirst(drafter)
        self.eos_ids = frozenset(eos_ids)
        self.scheduler = Scheduler(target, max_batch=limits.max_batch, max_round_tokens=limits.max_round_tokens)
        self.stats = Stats()
        """The figures of every request that has ended, summed."""
        self._live: dict[int, Live] = {}
        self._flight: Flight | None = None
        self._ids = count()

    def step(self) -> list[Event]:
        """One round: every sequence in it reads on, and once read moves on by at least one token.

        Where passes are launched and not waited for, a step ends the round in flight, launches the
        next, and puts what the first brought into words while the device works.
        """
        outcomes = self._land()
        self._flight = self._launch()
        if not self.target.launches:
            outcomes = self._land()
        return [self._tell(outcome) for outcome in outcomes]

    def _launch(self) -> Flight | None:
        """Schedule, propose, score: a round on its way. None where there is nothing to do."""
        began = time.perf_counter()
        turns = self.scheduler.next_round(self.drafter.max_tokens)
        if not turns:
            return None
        for seq in self.scheduler.preempted:
            self._live[seq.id].stats.preemptions += 1
        drafting = time.perf_counter()
        drafts = self._propose(turns)
        scoring = time.perf_counter()
        spans = [_span(turn, draft) for turn, draft in zip(turns, drafts, strict=True)]
        logits = self.target.score(spans)
        return Flight(turns, spans, logits, scoring, Times(draft=scoring - drafting, host=drafting - began, rounds=1))

    def _land(self) -> list[Outcome]:
        """Verify and commit the round in flight. What was cancelled meanwhile is left out."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        seqs, drafts = [turn.seq for turn in flight.turns if turn.complete], [s.draft for s in flight.spans if s.wanted]
        verdicts = self.verifier.judge(seqs, drafts, flight.logits)
        landed = time.perf_counter()
        flight.times.verify = landed - flight.scored
        self._read([span for span in flight.spans if not span.wanted and span.seq_id in self._live])
        outcomes: list[Outcome] = []
        row = 0
        for span, verdict in zip((s for s in flight.spans if s.wanted), verdicts, strict=True):
            if span.seq_id in self._live:
                outcomes.append(self._commit(span, verdict, flight.logits[row:], landed))
            row += span.rows
        self._observe(outcomes)
        self._account(flight, landed)
        for outcome in outcomes:
            if outcome.live.seq.finish is not None:
                self._retire(outcome.live)
        return outcomes

    def _tell(self, outcome: Outcome) -> Event:
        """Put into words what a round brought a sequence; with its last event go its figures."""
        event = describe(outcome)
        if event.finish is None:
            return event
        self.stats.add(outcome.live.stats)
        return replace(event, stats=outcome.live.stats)

    def submit(self, request: Request) -> list[int]:
        """Queue a request; returns a sequence id for each of its n texts. RequestError if it cannot be served."""
        params, limit = request.params, self.limit(request)
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
        live.seq.finish = "cancelled"
        live.stats.ended = time.perf_counter()
        self._retire(live)
        return self._tell(Outcome(live))

    @property
    def busy(self) -> bool:
        return len(self.scheduler) > 0

    def alive(self, seq_id: int) -> bool:
        """Whether the sequence has not ended yet."""
        return seq_id in self._live

    def live(self, seq_id: int) -> Live:
        """A sequence that has not ended. Read only."""
        return self._live[seq_id]

    def check(self) -> None:
        """Raise unless every page is accounted for, and none is in use where nothing runs."""
        self.target.pool.check()
        if not self.busy and (self.target.pool.used or self._live):
            raise OutriderError(f"idle, yet {self.target.pool.used} pages in use and {len(self._live)} texts alive")

    def _propose(self, turns: list[Turn]) -> list[Draft]:
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
            return Outcome(live, span.draft, error=str(verdict))
        count, pieces = extend(seq, verdict.tokens, live.text)
        kept = verdict.tokens[:count]
        seq.cached = self.target.keep(span, verdict.path[: count - 1])
        self.target.pool.publish(seq.id, seq.tokens, seq.cached)
        live.stats.tell(count, now)
        logprobs = logprobs_of(seq, verdict, kept, logits)
        seq.round += 1
        return Outcome(live, span.draft, verdict, kept, pieces, logprobs)

    def _observe(self, outcomes: list[Outcome]) -> None:
        told = [(o.live.seq, o.draft, o.verdict) for o in outcomes if o.verdict is not None]
        if told:
            self._proposer.observe([s for s, _, _ in told], [d for _, d, _ in told], [v for _, _, v in told])

    def _account(self, flight: Flight, landed: float) -> None:
        times = flight.times
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

    def limit(self, request: Request) -> int:
        """Most tokens the text may have; RequestError where the request cannot be served at all."""
        length, vocab = len(request.prompt), self.target.vocab_size
        capacity = self.target.pool.count * self.target.pool.size
        if length == 0:
            raise RequestError("the prompt is empty: give it at least one token")
        for token in (*request.prompt, *request.prediction):
            if not is_whole(token) or not 0 <= token < vocab:
                raise RequestError(f"token {token!r} does not exist: this model's ids run from 0 to {vocab - 1}")
        if request.max_draft is not None and (not is_whole(request.max_draft) or request.max_draft < 0):
            raise RequestError(f"max_draft must be a whole number, at least 0; got {request.max_draft!r}")
        check_token_ids(request.params, vocab)
        if request.constraint is not None and (request.constraint.problem or request.constraint.done):
            raise RequestError(request.constraint.problem or "the constraint allows nothing but the empty text")
        room = min(self.target.context, capacity)
        if length >= room:
            raise RequestError(
                f"the prompt has {length} tokens and must leave room for one more; the model's context holds "
                f"{self.target.context} and the cache {capacity}: shorten the prompt or enlarge the cache"
            )
        return min(length + request.params.max_tokens, room)


def _span(turn: Turn, draft: Draft) -> Span:
    seq = turn.seq
    return Span(seq.id, seq.cached, tuple(seq.tokens[seq.cached : seq.cached + turn.chunk]), draft, turn.complete)
