"""Answer prompts with an engine, `batch` at a time, and count tokens, rounds, drafts and times."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from outrider.bench.statistics import bigrams
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams, Token
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import Request
from outrider.engine.stats import Stats


@dataclass(slots=True)
class Answer:
    """One text, and what its rounds did. Tokens are those the engine emitted, a final end-of-text token included."""

    tokens: list[Token] = field(default_factory=list[Token])
    rounds: int = 0
    """Rounds that emitted tokens."""
    drafts: int = 0
    """Rounds that emitted tokens and had a draft."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list[int])
    """For each depth, the number of drafts whose token there was accepted."""
    rejected_at: list[int] = field(default_factory=list[int])
    """For each depth, the number of drafts whose first rejected token is there; those behind it are in neither list."""
    stats: Stats | None = None

    def count(self, event: Event) -> None:
        """Add the event of one round."""
        if event.stats is not None:
            self.stats = event.stats
        if event.error:
            raise ConfigError(f"a text failed: {event.error}")
        if not event.tokens:
            return
        self.tokens += event.tokens
        self.rounds += 1
        judged = event.judged
        if judged is None or not judged.drafted:
            return
        accepted = judged.accepted
        self.drafts += 1
        self.drafted += judged.drafted
        self.accepted += accepted
        for counts in (self.accepted_at, self.rejected_at):
            counts += [0] * (accepted + 1 - len(counts))
        for depth in range(accepted):
            self.accepted_at[depth] += 1
        self.rejected_at[accepted] += judged.rejected

    @property
    def digest(self) -> str:
        return digest_of(self.tokens)


def digest_of(tokens: Seq[Token]) -> str:
    """A short hash of a text's tokens, to compare texts by."""
    return sha256(repr(tuple(tokens)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Answers:
    """All texts of a list of prompts, in their order."""

    answers: list[Answer]
    seconds: float
    """From the first submission to the last token."""
    passes: int
    """Rounds of the engine, those that read prompts included: passes of the target."""

    def as_line(self) -> dict[str, Any]:
        """The fields for a run's file: sums, and for each text the values that intervals are computed from."""
        done = [(answer, answer.stats) for answer in self.answers if answer.stats is not None]
        pairs = [bigrams(answer.tokens) for answer in self.answers]
        return {
            "tokens": sum(len(answer.tokens) for answer in self.answers),
            "seconds": self.seconds,
            "passes": self.passes,
            "prompt_tokens": sum(stats.prompt_tokens for _, stats in done),
            "decode_tokens": sum(stats.tokens - stats.first_tokens for _, stats in done),
            "decode_seconds": sum(stats.ended - stats.first for _, stats in done),
            "first_token_seconds": [max(0.0, stats.first - stats.started) for _, stats in done],
            "rounds": [answer.rounds for answer in self.answers],
            "drafts": [answer.drafts for answer in self.answers],
            "drafted": sum(answer.drafted for answer in self.answers),
            "accepted": [answer.accepted for answer in self.answers],
            "accepted_at": _sums([answer.accepted_at for answer in self.answers]),
            "rejected_at": _sums([answer.rejected_at for answer in self.answers]),
            "lengths": [len(answer.tokens) for answer in self.answers],
            "distinct_bigrams": sum(distinct for distinct, _ in pairs),
            "bigrams": sum(count for _, count in pairs),
            "texts": [answer.digest for answer in self.answers],
        }


def answer_all(
    engine: Engine, prompts: Seq[Seq[Token]], params: Seq[SamplingParams], *, batch: int, salt: str
) -> Answers:
    """Answer the prompts with `batch` of them at once: as soon as one is done, the next is submitted.

    salt: keeps the caches apart from those of other calls. RequestError for a prompt that cannot be served.
    """
    requests = [
        Request(prompt=tuple(prompt), params=each, salt=salt) for prompt, each in zip(prompts, params, strict=True)
    ]
    answers, places = [Answer() for _ in requests], dict[int, int]()
    waiting, passes = iter(enumerate(requests)), 0
    began = now = time.perf_counter()
    try:
        while True:
            while len(places) < batch and (following := next(waiting, None)) is not None:
                place, request = following
                places[engine.submit(request)[0]] = place
            if not engine.busy:
                break
            events, passes = engine.step(), passes + 1
            now = time.perf_counter()
            for event in events:
                answers[places[event.seq_id]].count(event)
                if event.finish is not None:
                    del places[event.seq_id]
    finally:
        for seq_id in places:  # interrupted
            engine.cancel(seq_id)
    return Answers(answers, now - began, passes)


def _sums(lists: Seq[Seq[int]]) -> list[int]:
    out = [0] * max(map(len, lists), default=0)
    for each in lists:
        for i, count in enumerate(each):
            out[i] += count
    return out
