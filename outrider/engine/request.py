"""What a caller asks of the engine, and whether it can be served."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core import Constraint, SamplingParams, Token, check_token_ids, is_whole
from outrider.errors import ConfigError, RequestError
from outrider.target.base import Target


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


def longest(request: Request, target: Target) -> int:
    """Most tokens the text may have; RequestError where the request cannot be served at all."""
    length, vocab = len(request.prompt), target.vocab_size
    capacity = target.pool.count * target.pool.size
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
    room = min(target.context, capacity)
    if length >= room:
        raise RequestError(
            f"the prompt has {length} tokens and must leave room for one more; the model's context holds "
            f"{target.context} and the cache {capacity}: shorten the prompt or enlarge the cache"
        )
    return min(length + request.params.max_tokens, room)
