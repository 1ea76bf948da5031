"""Mode `distribution` where a seed is used again and the drafter remembers what that seed brought before."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.engine.request import Request, draw_nonce
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

PROBS = (0.5, 0.3, 0.2)
PROMPT = (0, 1, 2)
SEEDS = 1500


class Fixed(ToyRunner):
    """The same probabilities after every text."""

    def _make_row(self, tail: tuple[Token, ...]) -> Tensor:
        return torch.tensor(PROBS).log()


def engine(drafter: str) -> Engine:
    context = DrafterContext(vocab_size=3, context=64, mode="distribution")
    return Engine(
        Fixed(3, context=64, cache_tokens=256),
        parse_drafter(drafter).build(context),
        make_verifier("distribution"),
        ByteTokenizer(),
    )


def answer(tried: Engine, seed: int, prediction: tuple[Token, ...] = ()) -> tuple[Token, ...]:
    params = SamplingParams(temperature=1.0, max_tokens=3, seed=seed, ignore_eos=True)
    (seq_id,) = tried.submit(Request(prompt=PROMPT, params=params, prediction=prediction))
    seq = tried.live(seq_id).seq
    while tried.busy:
        tried.step()
    return tuple(seq.tokens[seq.prompt_len :])


def assert_follows_the_target(texts: list[tuple[Token, ...]]) -> None:
    """The first three tokens of every text, against 27 products of probabilities."""
    counts = torch.zeros(3, 3, 3, dtype=torch.float64)
    for text in texts:
        counts[text] += 1
    p = torch.tensor(PROBS, dtype=torch.float64)
    expected = p[:, None, None] * p[:, None] * p * len(texts)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert chi < 26 + 6 * math.sqrt(2 * 26)  # a false alarm in about a billion


@pytest.mark.parametrize("time", [2, 3])
def test_answers_to_the_same_request_and_seed_follow_the_target(time: int):
    """From memory of the first answers: with draws by seed alone the third answer follows (.50, .40, .10)."""
    texts = []
    for seed in range(SEEDS):
        tried = engine("suffix:min_prob=0")
        texts.append([answer(tried, seed) for _ in range(time)][-1])
    assert_follows_the_target(texts)


def test_a_prediction_that_another_engine_wrote_with_the_same_seed():
    texts = []
    for seed in range(SEEDS):
        earlier = answer(engine("prediction:min_prob=0"), seed, prediction=(0, 0, 0))
        texts.append(answer(engine("prediction:min_prob=0"), seed, prediction=earlier))
    assert_follows_the_target(texts)


def test_an_engine_given_the_same_requests_writes_the_same_texts():
    first, again = (engine("suffix:min_prob=0") for _ in range(2))
    assert [answer(first, 7) for _ in range(4)] == [answer(again, 7) for _ in range(4)]


def test_draws_differ_by_number_prompt_and_request_with_a_prediction():
    asked, predicted = Request(prompt=PROMPT), Request(prompt=PROMPT, prediction=(1,))
    nonces = [draw_nonce(0, asked), draw_nonce(1, asked), draw_nonce(0, Request(prompt=(*PROMPT, 1)))]
    nonces += [draw_nonce(0, predicted), draw_nonce(0, predicted)]
    assert len(set(nonces)) == 5
    assert draw_nonce(0, asked) == nonces[0]
    assert Sequence(0, [1], 1, SamplingParams(), seed=9, nonce=12).draw_seed == 9 ^ 12
