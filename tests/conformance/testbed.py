"""A model under test: plain decoding to judge by, engines to try, and requests that hold every pair of options."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from all_pairs import all_pairs
from drafter_cast import Stage, make_drafter
from plain_decoding import Told, World, assert_same, plain, request, run
from torch import Tensor

from outrider.core.sampling import SamplingParams, Token, derive_seeds
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.engine.stats import Stats
from outrider.runners.base import Runner
from outrider.verify.base import make_verifier

PIECES = (*("", "a", "b", "c", "ab", "ba", " ", "d", "abc", "é", "", "ca"), *"efghijklmnop")
VOCAB = len(PIECES)
EOS = 0
CONTEXT = 160


class PieceTokenizer:
    """One piece of text a token, some of several characters, some of none; the first is the end of text."""

    vocab_size = VOCAB
    tokens = PIECES
    token_bytes = tuple(piece.encode() for piece in PIECES)
    own_texts = None
    bos_id = None
    eos_ids = frozenset({EOS})

    def encode(self, text: str, *, special: bool = True, allow_special_tokens: bool = True) -> list[Token]:
        return [PIECES.index(char) for char in text]

    def encode_chat(self, messages: Seq[Any]) -> list[Token]:
        return self.encode("".join(f"{message['content']} " for message in messages))

    def decode(self, ids: Seq[Token]) -> str:
        return "".join(PIECES[i] for i in ids)


TOKENIZER = PieceTokenizer()


def avoid_last(tokens: Seq[Token], logits: Tensor) -> Tensor:
    """A logits processor that hangs on the whole text: never the last token again, every third place is special."""
    out = logits.clone()
    out[tokens[-1]] = float("-inf")
    if len(tokens) % 3 == 0:
        out[sum(tokens) % len(out)] += 5.0
    return out


OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.7, 1.4),
    "top_k": (0, 5),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.05),
    "typical_p": (1.0, 0.7),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0.0, 0.8),
    "frequency_penalty": (0.0, 0.5, -0.3),
    "logit_bias": ({}, {3: 3.0, 12: -50.0}),
    "allowed_token_ids": (None, (*range(0, VOCAB, 2), 1, 3, 5)),
    "banned_token_ids": ((), (2, 6, 13)),
    "min_tokens": (0, 7),
    "max_tokens": (1, 9, 30),
    "stop_token_ids": ((), (4, 11)),
    "stop": ((), ("cab", "ab", "gi"), ("o", "éo")),
    "ignore_eos": (False, True),
    "seed": (0, 12345, (1 << 64) - 1),
    "n": (1, 3),
    "logprobs": (None, 0, 4),
    "logits_processors": ((), (avoid_last,)),
}


def pairwise_params(designs: int) -> list[SamplingParams]:
    """Sampling parameters among which every two values of every two options meet, `designs` times over."""
    rows = [row for seed in range(designs) for row in all_pairs(OPTIONS, seed=seed)]
    return [SamplingParams(**(row | {"min_tokens": min(row["min_tokens"], row["max_tokens"])})) for row in rows]


def up_to_the_end() -> list[Request]:
    """Texts that fill the context: one long, the others from shortly before its end, which they reach apart."""
    starts = ((19, 0.0), (CONTEXT - 21, 1.0), (CONTEXT - 14, 0.0))
    return [
        request(
            [1 + place % (VOCAB - 1) for place in range(start)],
            max_tokens=CONTEXT - start,
            temperature=temperature,
            seed=start,
            ignore_eos=True,
        )
        for start, temperature in starts
    ]


@dataclass
class Testbed:
    """One model; `target` and `draft` make a fresh one to score and to draft with."""

    __test__ = False  # no test, whatever its name begins with

    world: World
    target: Callable[[int], Runner]
    """By the tokens its cache holds."""
    draft: Callable[[str], Runner]
    """By the names in `drafter_cast.Stage`."""
    _requests: dict[int, tuple[Request, ...]] = field(default_factory=dict)

    def judged(self, asked: Request) -> list[Told]:
        """The text of plain decoding, computed once."""
        key = repr((asked.prompt, asked.params))
        if key not in self.world.judged:
            self.world.judged[key] = plain(self.world, asked)
        return self.world.judged[key]

    def engine(
        self,
        drafter: str,
        requests: Seq[Request] = (),
        *,
        mode: Literal["seeded", "distribution"] = "seeded",
        limits: EngineLimits | None = None,
        cache_tokens: int = 4096,
    ) -> Engine:
        """An engine on a fresh target; drafters that know the answers know those of `requests`."""
        answers = {
            (asked.prompt, seed): told.tokens
            for asked in requests
            for seed, told in zip(derive_seeds(asked.params), self.judged(asked), strict=True)
        }
        target = self.target(cache_tokens)
        stage = Stage(VOCAB, CONTEXT, TOKENIZER, self.draft, mode, answers, target)
        return Engine(
            target,
            make_drafter(drafter, stage),
            make_verifier(mode),
            TOKENIZER,
            eos_ids=TOKENIZER.eos_ids,
            limits=limits,
        )

    def check(
        self,
        drafter: str,
        requests: Seq[Request],
        *,
        limits: EngineLimits | None = None,
        cache_tokens: int = 4096,
        tolerance: float = 1e-5,
    ) -> Stats:
        """Run the requests together and compare each with the judge; returns the engine's figures."""
        tried = self.engine(drafter, requests, limits=limits, cache_tokens=cache_tokens)
        for told, asked in zip(run(tried, requests), requests, strict=True):
            assert_same(told, self.judged(asked), tolerance=tolerance)
        return tried.stats

    def pairwise_requests(self, designs: int = 2) -> tuple[Request, ...]:
        """A request for each combination, each with a prompt of its own and, for every other one, a prediction."""
        if designs not in self._requests:
            rng = random.Random(1)
            requests: list[Request] = []
            for i, params in enumerate(pairwise_params(designs)):
                prompt = [i % VOCAB, i // VOCAB, *rng.choices(range(1, VOCAB), k=rng.choice((1, 2, 15, 16, 17, 40)))]
                made = Request(prompt=tuple(prompt), params=params, max_draft=(None, None, 3)[i % 3])
                requests.append(replace(made, prediction=self._prediction(made, rng)) if i % 2 else made)
            self._requests[designs] = tuple(requests)
        return self._requests[designs]

    def _prediction(self, asked: Request, rng: random.Random) -> tuple[Token, ...]:
        """What the answer will be, but for an edit."""
        answer = list(self.judged(asked)[0].tokens)
        answer[rng.randrange(len(answer))] = rng.randrange(VOCAB)
        return tuple(answer)
