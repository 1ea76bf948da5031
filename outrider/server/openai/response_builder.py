"""From a request's events to its response, whole or in chunks. No I/O. The routes' builders derive from this."""

from __future__ import annotations

import math
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.core.sampling import Token
from outrider.engine.events import Event
from outrider.engine.stats import Stats, Tally, total
from outrider.server.http.errors import APIError
from outrider.server.openai.token_texts import TokenTexts, clamp_logprob
from outrider.server.openai.translate import TranslatedRequest

ID_PREFIXES = {"chat.completion": "chatcmpl-", "text_completion": "cmpl-", "response": "resp_"}


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the client wants besides the text."""

    logprobs: int | None = None
    """Alternatives at each token; None: no log-probabilities."""
    provenance: bool = False
    usage: bool = False
    """Whether a stream ends with a chunk of the request's usage and metrics."""


@dataclass(slots=True)
class ChoiceBuffer:
    """The events of one choice so far."""

    events: list[Event] = field(default_factory=list[Event])

    def add(self, event: Event) -> None:
        """Add an event. APIError where the sequence failed: 400 by the request's fault, 500 by the model's."""
        if event.finish == "error":
            # without the engine's own number of the request, which reveals how many others there were
            message = re.sub(r"^request \d+ ", "this request ", event.error)
            if event.at_fault == "model":
                raise APIError(500, f"the model failed on this request alone: {message}", code="model_error")
            raise APIError(400, message, code="invalid_value")
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


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    """The fields that every response and chunk begins with."""

    kind: str
    """chat.completion, text_completion or response."""
    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def make(cls, kind: str, model: str, fingerprint: str) -> ResponseMeta:
        return cls(kind, ID_PREFIXES[kind] + secrets.token_hex(12), int(time.time()), model, fingerprint)

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


class ResponseBuilder(ABC):
    """Builds the response of one request from its events."""

    named_events = False
    """Whether each event of a stream is named by its chunk's type. If so, the last event's type ends it, not [DONE]."""

    def __init__(
        self, meta: ResponseMeta, request: TranslatedRequest, options: ResponseOptions, texts: TokenTexts
    ) -> None:
        self.meta, self.request, self.options, self.texts = meta, request, options, texts
        self.buffers = [ChoiceBuffer() for _ in range(len(request.prompts) * request.n)]

    def add(self, index: int, event: Event) -> None:
        """Add an event of a choice. APIError where its sequence failed."""
        self.buffers[index].add(event)

    @property
    def is_long(self) -> bool:
        """Whether the response lists every token, so that writing it would block the event loop noticeably."""
        return self.options.logprobs is not None or self.options.provenance

    @abstractmethod
    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """The chunks before any generated text."""

    @abstractmethod
    def event_chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """The chunks of one event."""

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The chunk after all choices have ended, with usage and metrics, where usage is wanted."""
        if self.options.usage:
            yield self.meta.wrap([], chunk=True) | {"usage": self._usage(), "metrics": self._metrics()}

    def error_chunk(self, error: APIError) -> dict[str, Any]:
        """The last chunk of a stream that fails."""
        return error.body()

    def response(self) -> dict[str, Any]:
        """The whole response, once every sequence has ended."""
        choices = [self._choice(i, buffer) for i, buffer in enumerate(self.buffers)]
        return self.meta.wrap(choices) | {"usage": self._usage(), "metrics": self._metrics()}

    @abstractmethod
    def _choice(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        """One choice of a whole response."""

    def _chunk(self, index: int, content: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A chunk of one choice."""
        choice = {"index": index} | content | {"logprobs": None, "finish_reason": None} | more
        chunk = self.meta.wrap([choice], chunk=True)
        return chunk | {"usage": None} if self.options.usage else chunk

    def _final_chunk(
        self, index: int, content: dict[str, Any], reason: str | None, stop: Token | str | None
    ) -> dict[str, Any]:
        """The chunk that ends a choice, with its metrics unless the usage chunk has those of the whole request.

        Never both: aiperf drops a request where several chunks have metrics.
        """
        chunk = self._chunk(index, content, finish_reason=reason, stop_reason=stop)
        return chunk if self.options.usage else chunk | {"metrics": speculation_metrics([self.buffers[index].stats])}

    def _metrics(self) -> dict[str, Any]:
        return speculation_metrics(buffer.stats for buffer in self.buffers)

    def _usage(self) -> dict[str, Any]:
        return usage(sum(map(len, self.request.prompt_tokens)), self.buffers, self.request.n)


def usage(prompt_tokens: int, choices: list[ChoiceBuffer], n: int) -> dict[str, Any]:
    """OpenAI's usage object. A prompt counts once, however many choices it has."""
    stats = [each.stats for each in choices]
    generated = sum(each.tokens for each in stats)
    predicted = [each.drafters.get("prediction", Tally()) for each in stats]
    judged = [event.judged for each in choices for event in each.events if event.judged is not None]
    accepted = sum(each.accepted for each in judged if each.source == "prediction")
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": sum(each.shared_tokens for each in stats[::n])},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(each.drafted for each in predicted) - accepted,
        },
    }


def speculation_metrics(stats: Iterable[Stats]) -> dict[str, Any]:
    """The metrics of speculation, named as in vLLM; rounds without a draft count only as passes.

    No num_spec_tokens: the length of a draft varies, so the histogram has no fixed number of entries.
    """
    summed = total(stats)
    drafts = Tally()
    for tally in summed.drafters.values():
        drafts.add(tally)
    at = drafts.accepted_at
    histogram = [a - b for a, b in zip([drafts.rounds, *at], [*at, 0], strict=True)]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + drafts.accepted / drafts.rounds if drafts.rounds else 1.0,
            "draft_acceptance_rate": drafts.accepted / drafts.drafted if drafts.drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": drafts.rounds,
            "num_accepted_draft_tokens": drafts.accepted,
            "num_draft_tokens": drafts.drafted,
            "num_accepted_tokens_per_pos": at,
            "acceptance_rate_per_pos": [a / drafts.rounds for a in at],
            "num_target_passes": summed.passes,
            "drafters": {name: tally.accepted for name, tally in summed.drafters.items()},
            "decisions": summed.decisions_dict(),
        }
    }


def provenance_of_event(event: Event) -> list[dict[str, Any]]:
    """Where each token of an event comes from. The target's probability is known where logprobs were requested."""
    probs = [math.exp(clamp_logprob(each.logprob)) for each in event.logprobs] or [None] * len(event.tokens)
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
