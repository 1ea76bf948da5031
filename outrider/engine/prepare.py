"""Start-up on CUDA, so that no request waits for it: passes are captured, then requests of every kind are answered.

The requests are answered by an engine of their own on the same model and drafter. Kernels are compiled, libraries
loaded and memory allocated by them, in just the way later requests use them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams, Token
from outrider.drafters.base import Drafter
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.engine.scoring import Scoring
from outrider.engine.text import Detokenizer
from outrider.runners.base import Runner
from outrider.runners.compile_counter import COUNTER, LateWork, ReadyMark, watch_triton
from outrider.verify.base import Verifier

__all__ = ["LateWork", "ReadyMark", "prepare", "start_up"]

PROMPT_LENGTHS = (1, 3, 20, 33, 64, 65, 100, 128, 129, 200, 256, 400, 512, 700, 1024, 1500, 2048, 3000, 4096)
"""Libraries choose among their kernels by the number of rows; each of these may be the first to need one."""
OPTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "typical_p": 0.9},
    {"logprobs": 2},
    {"temperature": 0.8, "logprobs": 2, "top_p": 0.9},
    {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    {"temperature": 0.8, "logit_bias": {1: 1.0}, "banned_token_ids": (2,), "min_tokens": 2},
    {"allowed_token_ids": (1, 2, 3)},
    {"logits_processors": (lambda tokens, logits: logits,)},
)
NEW_TOKENS = 4
SHORT = 20  # tokens of a short prompt
MAX_SEQUENCES = 256  # of one batch: larger ones are scored in several passes


@contextmanager
def start_up() -> Iterator[None]:
    """A context in which what is compiled or captured does not count as late.

    Objects that exist already are not searched for garbage before each capture, which takes 0.1 s where there are many.
    """
    if torch.cuda.is_initialized():
        gc.collect()
    gc.freeze()
    try:
        with COUNTER.start_up():
            yield
    finally:
        gc.unfreeze()


def prepare(
    target: Runner,
    drafter: Drafter,
    verifier: Verifier,
    tokenizer: Detokenizer,
    limits: EngineLimits,
    progress: Any = None,
) -> None:
    """Compile, capture and allocate now what rounds will need, where the target's device does such things.

    progress: as `Progress` of the checkpoints; None tells nobody.
    """
    captured = target.capture(limits.max_batch, drafter.traits.max_tokens + 1)
    _report(progress, "capturing passes", None, captured)
    if target.device.type == "cuda":
        watch_triton()
        engine = Engine(target, drafter, verifier, tokenizer, limits=limits)
        batches = warm_up_batches(target, limits)
        _report(progress, "compiling kernels for prompts", len(batches) + 1, answer_batches(engine, batches))


def _report(progress: Any, label: str, total: int | None, steps: Iterator[Any]) -> None:
    """Take all steps, and report them to `progress` if it is given and there are any."""
    count = 0
    for count, _ in enumerate(steps, start=1):
        if progress is not None:
            if count == 1:
                progress.start(label, total)
            progress.advance(1)
    if progress is not None and count:
        progress.done()


def answer_batches(engine: Engine, batches: Seq[Seq[Request]]) -> Iterator[int]:
    """Answer batch after batch, then score a text; yields the number of each once it is done."""
    for i, batch in enumerate(batches):
        for request in batch:
            engine.submit(request)
        while engine.busy:
            engine.step()
        yield i
    scoring = Scoring(engine.target, _tokens(min(SHORT, engine.target.context - 1), engine.target.vocab_size), 2)
    while not scoring.done and scoring.step():
        pass
    scoring.close()
    yield len(batches)


def warm_up_batches(target: Runner, limits: EngineLimits) -> list[list[Request]]:
    """Requests that together need all that later ones can: every length, option, and size of batch.

    Those of one batch run together.
    """
    room = min(target.context, target.pool.count * target.pool.size) - NEW_TOKENS - 1
    vocab, most = target.vocab_size, min(limits.max_batch, MAX_SEQUENCES)
    lengths = sorted({min(length, room) for length in (*PROMPT_LENGTHS, limits.max_round_tokens)})
    short = _tokens(min(SHORT, room), vocab)
    batches = [[_request(_tokens(length, vocab), {}, f"length {length}")] for length in lengths]
    # the same texts and a little more: what is left to read after a prefix that is cached
    batches += [
        [_request(_tokens(min(length + more, room), vocab), {}, f"length {length}")]
        for length in lengths[len(lengths) // 2 : len(lengths) // 2 + 1]
        for more in (0, 3, 50)
    ]
    for options in OPTIONS:
        batches.append([_request(short, options, "alone")])
    batches.append([_request(short, {}, "constrained", constraint=_Unconstrained(vocab))])
    together = [_request(short, OPTIONS[i % len(OPTIONS)], f"together {i}") for i in range(most)]
    batches += [together[: 1 << i] for i in range(1, (most - 1).bit_length() + 1)]
    batches.append([*together[: most // 2], *(_request(_tokens(min(300, room), vocab), {}, "long") for _ in range(2))])
    return batches


def _request(prompt: tuple[Token, ...], options: Mapping[str, Any], salt: str, **given: Any) -> Request:
    params = SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": 1, **options})
    return Request(prompt=prompt, params=params, salt=f"start-up, {salt}", **given)


def _tokens(count: int, vocab: int) -> tuple[Token, ...]:
    """A text that repeats itself, so that drafters find something to draft."""
    return tuple(i % min(13, vocab) for i in range(max(1, count)))


class _Unconstrained:
    """A `Constraint` that allows everything."""

    done, problem = False, ""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def allowed(self, paths: Seq[tuple[Token, ...]], stops: frozenset[Token]) -> Tensor:
        return torch.ones(len(paths), self.vocab, dtype=torch.bool)

    def advance(self, tokens: Seq[Token]) -> None:
        pass

    def forced(self) -> tuple[Token, ...]:
        return ()

    def fork(self) -> _Unconstrained:
        return self
