"""The judge: plain decoding, one token at a time, with stops and limits of its own. It knows no engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams, Token, derive_seeds
from outrider.core.sequence import Sequence
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import Request
from outrider.verify.noise import gumbel
from outrider.verify.probs import process_logits


class Decodes(Protocol):
    def decode(self, ids: list[int], /) -> str: ...


@dataclass(frozen=True)
class World:
    """A model as the judge sees it: what follows a text, how it is written, and where it must end."""

    logits_after: Callable[[Seq[Token]], Tensor]  # text -> [vocab]
    tokenizer: Decodes
    eos_ids: frozenset[Token] = frozenset()
    room: int = 1 << 20
    """Max tokens in all."""
    judged: dict[str, list[Told]] = field(default_factory=dict, repr=False, compare=False)
    """The texts of plain decoding so far, by their requests."""


@dataclass(frozen=True)
class Told:
    """One text, by whoever told it. Log-probabilities compare apart, since their last bits may differ."""

    tokens: tuple[Token, ...]
    text: str
    finish: str
    stop_reason: Token | str | None = None
    logprobs: tuple[tuple[float, int, tuple[Token, ...]], ...] = field(default=(), compare=False)
    """Of each token: log-probability, rank, the best alternatives."""


def plain(world: World, request: Request) -> list[Told]:
    """All n texts of a request, by plain decoding."""
    return [plain_one(world, request, seed) for seed in derive_seeds(request.params)]


def plain_one(world: World, request: Request, seed: int) -> Told:
    params, text, logprobs = request.params, "", []
    tokens = list(request.prompt)
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else world.eos_ids)
    seq = Sequence(0, tokens, len(tokens), params, seed, frozenset(stop_ids))
    limit = min(len(tokens) + params.max_tokens, world.room)

    def told(finish: str, shown: str, reason: Token | str | None = None) -> Told:
        return Told(tuple(tokens[seq.prompt_len :]), shown, finish, reason, tuple(logprobs))

    while True:
        logits = world.logits_after(tokens)
        token = choice(logits, seq)
        if token is None:
            return told("error", text)
        tokens.append(token)
        if params.logprobs is not None:
            logprobs.append(opinion(logits, token, params.logprobs))
        may_stop = len(tokens) - seq.prompt_len >= params.min_tokens
        if may_stop and token in stop_ids:
            return told("stop", text, token)
        before, text = text, _text(world.tokenizer, tokens, seq.prompt_len)
        if may_stop and (found := first_stop(text, len(before), params.stop)):
            return told("stop", text[: found[0]], text[found[0] : found[1]])
        if len(tokens) >= limit:
            return told("length", text)


def choice(logits: Tensor, seq: Sequence) -> Token | None:
    """The target's own next token: argmax(shaped logits + noise); None where nothing is left."""
    shaped = process_logits(logits[None], seq, [()])[0].double()  # [vocab]
    if not seq.params.greedy:
        shaped = shaped + gumbel(seq.seed, len(seq.tokens), len(shaped))
    best = int(shaped.argmax())
    return best if bool(shaped[best].isfinite()) else None


def opinion(logits: Tensor, token: Token, top: int) -> tuple[float, int, tuple[Token, ...]]:
    """What raw logits [vocab] say of a token: log-probability, rank from 1, the best `top` tokens."""
    logp = torch.log_softmax(logits.double(), -1).tolist()
    order = sorted(range(len(logp)), key=lambda t: (-logp[t], t))
    return logp[token], 1 + sum(p > logp[token] for p in logp), tuple(order[:top])


def first_stop(text: str, old: int, stops: Seq[str]) -> tuple[int, int] | None:
    """Where the first stop string that ends beyond `old` characters begins and ends; of equals, the shorter."""
    found = [
        (begin, begin + len(stop))
        for stop in stops
        for begin in range(len(text) - len(stop) + 1)
        if text.startswith(stop, begin) and begin + len(stop) > old
    ]
    return min(found, default=None)


def _text(tokenizer: Decodes, tokens: list[Token], prompt_len: int) -> str:
    return tokenizer.decode(tokens)[len(tokenizer.decode(tokens[:prompt_len])) :]


def run(engine: Engine, requests: Seq[Request], *, most_rounds: int = 5000) -> list[list[Told]]:
    """All texts of all requests, submitted together; the engine's books are checked after every round."""
    ids = [engine.submit(request) for request in requests]
    heard: dict[int, list[Event]] = {i: [] for each in ids for i in each}
    for _ in range(most_rounds):
        if not engine.busy:
            return [[told_by(heard[i]) for i in each] for each in ids]
        for event in engine.step():
            heard[event.seq_id].append(event)
        engine.check()
    raise AssertionError(f"not finished after {most_rounds} rounds")


def told_by(events: Seq[Event]) -> Told:
    """Put one text together from its events, and hold each event to its contract."""
    for event in events:
        if event.finish not in ("error", "cancelled"):
            assert len(event.tokens) == len(event.pieces) == len(event.provenance) > 0
            assert event.text == "".join(event.pieces)
        assert len(event.logprobs) in (0, len(event.tokens))
    assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    last = events[-1]
    assert last.finish is not None
    assert last.stats is not None
    assert last.stats.tokens == sum(len(event.tokens) for event in events)
    logprobs = [each for event in events for each in event.logprobs]
    tokens = tuple(token for event in events for token in event.tokens)
    assert not logprobs or tuple(each.token for each in logprobs) == tokens
    return Told(
        tokens,
        "".join(event.text for event in events),
        last.finish,
        last.stop_reason,
        tuple((each.logprob, each.rank, tuple(t for t, _ in each.top)) for each in logprobs),
    )


def assert_same(told: list[Told], judged: list[Told], *, tolerance: float = 1e-5) -> None:
    """Same tokens, text, finish and stop reason; the same log-probabilities within the tolerance, ranks exactly."""
    assert told == judged
    for ours, theirs in zip(told, judged, strict=True):
        assert [each[1:] for each in ours.logprobs] == [each[1:] for each in theirs.logprobs]
        for (a, *_), (b, *_) in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert abs(a - b) <= tolerance


def request(prompt: Seq[Token], **options: object) -> Request:
    """A request from a prompt and sampling options."""
    return Request(prompt=tuple(prompt), params=SamplingParams(**options))  # pyright: ignore[reportArgumentType]
