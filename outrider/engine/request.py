"""What a caller asks of the engine, and whether it can be served."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b

from outrider.core.errors import RequestError
from outrider.core.sampling import (
    MAX_BATCH,
    MAX_TOKENS,
    SamplingParams,
    Token,
    check_int,
    check_token_ids,
    derive_seeds,
    is_int,
)
from outrider.core.sequence import Constraint, Sequence
from outrider.runners.base import Runner

MAX_CHARS_PER_TOKEN = 16  # of a prediction, on average; text has fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asks for: a prompt, how to sample, and how to draft."""

    prompt: tuple[Token, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    prediction: tuple[Token, ...] = ()
    """Text the output is expected to contain; drafted from, never forced."""
    max_draft: int | None = None
    """Max tokens drafted a round; 0 turns speculation off for this request."""
    salt: str = ""
    """Caches are never shared between requests of different salt."""
    constraint: Constraint | None = None
    """What the output may contain; each of the n texts gets a copy of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much one round takes on."""

    max_batch: int = 8
    """Max sequences in one round."""
    max_round_tokens: int = 512
    """Max tokens of one pass, drafts included; longer prompts are read in chunks. Decoding sequences get one anyway."""

    def __post_init__(self) -> None:
        check_int("max_batch", self.max_batch, 1, MAX_BATCH)
        check_int("max_round_tokens", self.max_round_tokens, 1, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that `validate_request` accepted for one runner: the engine does not look at it again."""

    request: Request
    limit: int
    """Max tokens the text may have, prompt included."""


def validate_request(request: Request, target: Runner) -> CheckedRequest:
    """The request with its limit; RequestError where it cannot be served at all. May run on any thread."""
    length, vocab = len(request.prompt), target.vocab_size
    capacity = target.pool.count * target.pool.size
    if length == 0:
        raise RequestError("the prompt is empty: give it at least one token")
    room = min(target.context, capacity)
    if length >= room:
        short = f"the context holds {room}: shorten the prompt"
        if capacity < target.context:
            short = f"the cache holds {room}: shorten the prompt or enlarge the cache (cache_tokens)"
        raise RequestError(f"the prompt has {length} tokens and must leave room for one more; {short}")
    for token in (*request.prompt, *request.prediction):
        if not is_int(token) or not 0 <= token < vocab:
            raise RequestError(f"token {token!r} does not exist: this model's ids run from 0 to {vocab - 1}")
    if request.max_draft is not None and (not is_int(request.max_draft) or request.max_draft < 0):
        raise RequestError(f"max_draft must be a whole number, at least 0; got {request.max_draft!r}")
    check_token_ids(request.params, vocab)
    if request.constraint is not None and (request.constraint.problem or request.constraint.done):
        raise RequestError(request.constraint.problem or "the constraint allows nothing but the empty text")
    return CheckedRequest(request, min(length + request.params.max_tokens, room))


def encode_prediction(text: str, encode: Callable[[str], Seq[Token]], limit: int) -> tuple[Token, ...]:
    """The first tokens of a prediction, at most `limit`; text that is far beyond them is not encoded."""
    return tuple(encode(text[: limit * MAX_CHARS_PER_TOKEN])[:limit])


def sequences_of(
    checked: CheckedRequest, ids: Iterator[int], eos_ids: frozenset[Token], *, drafted: bool
) -> list[Sequence]:
    """The n texts of a request, each with its own seed. drafted: whether anything may be drafted for them."""
    request, params = checked.request, checked.request.params
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
    return [
        Sequence(
            id=number,
            tokens=list(request.prompt),
            prompt_len=len(request.prompt),
            params=params,
            seed=seed,
            nonce=draw_nonce(number, request) if drafted else 0,
            stop_ids=stop_ids,
            limit=checked.limit,
            prediction=request.prediction,
            max_draft=request.max_draft,
            salt=request.salt,
            constraint=None if request.constraint is None else request.constraint.fork(),
        )
        for seed, number in zip(derive_seeds(params), ids, strict=False)
    ]


def draw_nonce(number: int, request: Request) -> int:
    """What makes the draws of a sequence, in mode `distribution`, independent of whatever its drafts come from.

    Drafts come from earlier answers of this engine, whose numbers differ, and from the prompt, which holds no answer
    that was written after that very prompt. A prediction may be an answer to this very request: then the nonce is
    random, and the seed alone does not determine the text.
    """
    if request.prediction:
        return secrets.randbits(64)
    digest = blake2b(array("q", (number, *request.prompt)).tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
