"""What chats and completions tell alike: who answers, usage, figures of speculation, provenance. No I/O."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from outrider.core.outputs import Provenance
from outrider.engine.events import Event
from outrider.engine.stats import Stats, Tally, total
from outrider.server.problems import Problem
from outrider.server.record import is_corrupted
from outrider.server.tokens import bounded


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the client wants told beside the text."""

    logprobs: int | None = None
    """Alternatives at each token; None: no log-probabilities at all."""
    provenance: bool = False
    usage: bool = False
    """Streams: one more chunk at the end, with the usage."""


@dataclass(slots=True)
class Told:
    """One choice so far."""

    events: list[Event] = field(default_factory=list[Event])

    def add(self, event: Event) -> None:
        """A Problem where the engine gave the text up: the client's own where its options left no token to choose."""
        if event.finish == "error" and not is_corrupted(event):
            raise Problem(400, _own_words(event), code="invalid_value")
        if event.finish == "error":
            raise Problem(500, f"the model failed on this request alone: {_own_words(event)}", code="model_error")
        self.events.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish(self) -> str | None:
        return self.events[-1].finish if self.events else None

    @property
    def stats(self) -> Stats:
        return (self.events[-1].stats if self.events else None) or Stats()

    @property
    def provenance(self) -> Iterable[Provenance]:
        return (each for event in self.events for each in event.provenance)


def _own_words(event: Event) -> str:
    """Why the engine gave a text up, without its number there, which tells how many others have asked."""
    return re.sub(r"^request \d+ ", "this request ", event.error)


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk and answer begins with."""

    kind: str
    """chat.completion or text_completion."""
    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def make(cls, kind: str, model: str, fingerprint: str) -> Head:
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        return cls(kind, f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, fingerprint)

    def wrap(self, choices: list[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        kind = f"{self.kind}.chunk" if chunk and self.kind == "chat.completion" else self.kind
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def usage(prompt_tokens: Iterable[int], told: list[Told], n: int) -> dict[str, Any]:
    """Tokens read and written. A prompt counts once, however many choices it has."""
    prompts = sum(prompt_tokens)
    stats = [each.stats for each in told]
    written = sum(each.tokens for each in stats)
    predicted = [each.drafters.get("prediction", Tally()) for each in stats]
    accepted = sum(p.drafter == "prediction" and p.origin == "accepted" for each in told for p in each.provenance)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
        "prompt_tokens_details": {"cached_tokens": sum(each.shared_tokens for each in stats[::n])},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(each.drafted for each in predicted) - accepted,
        },
    }


def metrics(stats: Iterable[Stats]) -> dict[str, Any]:
    """The figures of speculation, named as in vLLM; rounds without a draft count only as passes."""
    both = total(stats)
    drafts = Tally()
    for tally in both.drafters.values():
        drafts.add(tally)
    at = drafts.accepted_at
    histogram = [a - b for a, b in zip([drafts.rounds, *at], [*at, 0], strict=True)]
    return {
        "speculative_decoding": {
            "num_drafts": drafts.rounds,
            "num_spec_steps": drafts.rounds,
            "num_draft_tokens": drafts.drafted,
            "num_accepted_tokens": drafts.accepted,
            "num_accepted_tokens_per_pos": at,
            "mean_acceptance_length": 1 + drafts.accepted / drafts.rounds if drafts.rounds else 1.0,
            "draft_acceptance_rate": drafts.accepted / drafts.drafted if drafts.drafted else 0.0,
            "acceptance_rate_per_pos": [a / drafts.rounds for a in at],
            "acceptance_histogram": histogram,
            "num_target_passes": both.passes,
            "drafters": {name: tally.accepted for name, tally in both.drafters.items()},
        }
    }


def provenance(event: Event) -> list[dict[str, Any]]:
    """Who brought each token of an event, with the text it made ready to show: together, the event's text."""
    probs = [math.exp(bounded(each.logprob)) for each in event.logprobs] or [None] * len(event.tokens)
    return [
        {
            "token": piece,
            "token_id": token,
            "origin": who.origin,
            "drafter": who.drafter,
            "position": who.position,
            "round": who.round,
            "drafted": who.drafted,
            "target_prob": prob,
            "draft_prob": who.draft_prob,
        }
        for token, piece, who, prob in zip(event.tokens, event.pieces, event.provenance, probs, strict=True)
    ]
