"""The time to the first token for requests of many kinds: a slow one points to what start-up should have prepared."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from outrider.core.sampling import Token
from outrider.engine.request import Request
from outrider.llm import LLM

BUCKETS = (1, 33, 129, 513, 2049, 1 << 30)
"""Prompt lengths at which buckets begin, and the end of the last one."""
CANCELLED = 0.1  # of the requests, after their first token
SHARED = 0.3  # of the prompts begin as an earlier one did
AT_ONCE = (1,) * 30 + (3,)  # the number of requests that may run, drawn before every round
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.9, "typical_p": 0.8, "logprobs": 3},
    {"logprobs": 0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"presence_penalty": 0.5, "temperature": 1.1, "logit_bias": {5: 2.0}},
    {"stop": ("abc", "w300 w301")},
    {"allowed_token_ids": tuple(range(10, 200)), "temperature": 0.5},
    {"min_tokens": 3, "stop_token_ids": (7, 9)},
)


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """How long a request waited for its first token."""

    length: int
    """Tokens of its prompt."""
    seconds: float
    what: str
    """Its options, for people to read."""
    alone: bool = True
    """Whether no other request ran meanwhile."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The first answers to prompts of similar length."""

    low: int
    high: int
    count: int
    median: float
    slowest: FirstAnswer

    @property
    def ratio(self) -> float:
        return self.slowest.seconds / self.median

    def __str__(self) -> str:
        slow = self.slowest
        return (
            f"prompts of {self.low} to {self.high}: {self.count}, median {self.median * 1e3:.1f} ms, slowest "
            f"{slow.seconds * 1e3:.1f} ms ({self.ratio:.1f} times; {slow.length} tokens, {slow.what})"
        )


class EvenTokens:
    """A `Constraint` that allows even ids, as a grammar would allow some."""

    done, problem = False, ""

    def __init__(self, vocab: int) -> None:
        self.mask = torch.arange(vocab) % 2 == 0

    def allowed(self, paths: Seq[tuple[Token, ...]], stops: frozenset[Token]) -> Tensor:
        return self.mask.repeat(len(paths), 1)

    def advance(self, tokens: Seq[Token]) -> None:
        pass

    def forced(self) -> tuple[Token, ...]:
        return ()

    def fork(self) -> EvenTokens:
        return self


def mixed_requests(llm: LLM, count: int, max_length: int, seed: int = 0) -> list[Request]:
    """Requests of mixed lengths and options; some prompts begin as an earlier one did, some texts are constrained."""
    rng, vocab, prompts = random.Random(seed), llm.loaded.target.vocab_size, list[list[Token]]()
    requests: list[Request] = []
    for i in range(count):
        length = round(max_length ** rng.random())  # as many of 1 to 10 as of 100 to 1000
        prompt = [rng.randrange(vocab) for _ in range(length)]
        if prompts and rng.random() < SHARED:
            shared = rng.choice(prompts)[:length]
            prompt[: len(shared)] = shared
        prompts.append(prompt)
        constraint = EvenTokens(vocab) if i % 12 == 0 else None
        options = {} if constraint else OPTIONS[i % len(OPTIONS)]
        requests.append(llm.request(prompt, max_tokens=rng.randint(3, 24), seed=i, constraint=constraint, **options))
    return requests


def first_answers(llm: LLM, requests: Seq[Request], seed: int = 0) -> list[FirstAnswer]:
    """Answer all requests, some alone and some together; some are cancelled after their first token."""
    rng, engine, waiting = random.Random(seed), llm.engine, list(requests)
    began: dict[int, tuple[float, Request]] = {}
    accompanied: set[int] = set()
    answers: list[FirstAnswer] = []
    while waiting or engine.busy:
        for _ in range(rng.choice(AT_ONCE) - len(engine.scheduler)):
            if waiting:
                request = waiting.pop(0)
                (seq_id,) = engine.submit(request)
                began[seq_id] = time.perf_counter(), request
                accompanied |= began.keys() if len(engine.scheduler) > 1 else set()
        for event in engine.step():
            if event.seq_id not in began:
                continue
            at, request = began.pop(event.seq_id)
            seconds, alone = time.perf_counter() - at, event.seq_id not in accompanied
            answers.append(FirstAnswer(len(request.prompt), seconds, _describe(request), alone))
            if rng.random() < CANCELLED:
                engine.cancel(event.seq_id)
    return answers


def by_length(answers: Seq[FirstAnswer]) -> list[Bucket]:
    """The answers to requests that were alone, by the length of their prompts."""
    buckets: list[Bucket] = []
    for low, end in pairwise(BUCKETS):
        own = [answer for answer in answers if low <= answer.length < end and answer.alone]
        if own:
            slowest = max(own, key=lambda answer: answer.seconds)
            high = max(answer.length for answer in own)
            buckets.append(Bucket(low, high, len(own), median(answer.seconds for answer in own), slowest))
    return buckets


def _describe(request: Request) -> str:
    if request.constraint is not None:
        return "constrained"
    names = {name for options in OPTIONS for name in options}
    default = type(request.params)()
    given = [name for name in sorted(names) if getattr(request.params, name) != getattr(default, name)]
    return ", ".join(given) or "greedy"
