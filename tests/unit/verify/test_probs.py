"""From logits to probabilities, against Transformers' processors and against plain arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.verify.logprobs import token_logprobs
from outrider.verify.probs import apply_temperature, no_token_error, probs_of, process_logits

Options = dict[str, Any]

VOCAB = 60
PROMPT = [5, 9, 5, 31]
OUTPUT = [2, 9, 40]
PATHS = [(), (7,), (7, 5), (11, 40, 11)]


def logits(rows: int = len(PATHS), vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sequence(output: list[Token] | None = None, /, **options: Any) -> Sequence:
    params = SamplingParams(**options)
    tokens = PROMPT + (OUTPUT if output is None else output)
    return Sequence(4, tokens, len(PROMPT), params, seed=1, stop_ids=frozenset({0, 3}))


def transformers_probs(raw: Tensor, seq: Sequence, path: tuple[Token, ...], *warpers: Any) -> Tensor:
    """One row through Transformers: float64 [vocab]."""
    ids: Any = torch.tensor([[*seq.tokens, *path]])
    scores: Any = raw[None].clone()
    return LogitsProcessorList(warpers)(ids, scores)[0].double().softmax(-1)


WARPERS = {
    "repetition": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "reward": ({"repetition_penalty": 0.8}, [RepetitionPenaltyLogitsProcessor(0.8)]),
    "temperature": ({}, []),
    "top-k": ({"top_k": 7}, [TopKLogitsWarper(7)]),
    "top-k of more than there are": ({"top_k": 900}, [TopKLogitsWarper(900)]),
    "top-p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "a tiny top-p": ({"top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    "a large top-p": ({"top_p": 0.9995}, [TopPLogitsWarper(0.9995)]),
    "min-p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "typical": ({"typical_p": 0.6}, [TypicalLogitsWarper(0.6)]),
    "a tiny typical": ({"typical_p": 0.01}, [TypicalLogitsWarper(0.01)]),
    "all": (
        {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
        [TopKLogitsWarper(20), TopPLogitsWarper(0.95), MinPLogitsWarper(0.02), TypicalLogitsWarper(0.9)],
    ),
}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("options", "warpers"), WARPERS.values(), ids=WARPERS.keys())
def test_the_probabilities_are_those_of_transformers_row_by_row(
    temperature: float, options: Options, warpers: list[Any]
):
    for seed in range(5):
        raw, seq = logits(seed=seed), sequence(temperature=temperature, **options)
        got = probs_of(process_logits(raw, seq, PATHS))
        first = [w for w in warpers if isinstance(w, RepetitionPenaltyLogitsProcessor)]
        after = [w for w in warpers if w not in first]
        for row, path, ours in zip(raw, PATHS, got, strict=True):
            theirs = transformers_probs(row, seq, path, *first, TemperatureLogitsWarper(temperature), *after)
            assert torch.equal(ours > 0, theirs > 0)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


HEADS = {
    "peaked, top-p": ({"top_p": 0.9}, TopPLogitsWarper(0.9), 4.0, 0),
    "flat, top-p": ({"top_p": 0.3}, TopPLogitsWarper(0.3), 0.01, 1),
    "peaked, typical": ({"typical_p": 0.9}, TypicalLogitsWarper(0.9), 4.0, 0),
    "flat, typical": ({"typical_p": 0.9}, TypicalLogitsWarper(0.9), 0.01, 1),
}


@pytest.mark.parametrize(("options", "warper", "spread", "sorts"), HEADS.values(), ids=HEADS.keys())
def test_a_large_vocabulary_is_sorted_only_where_its_head_does_not_suffice(
    options: Options, warper: Any, spread: float, sorts: int
):
    raw = logits(2, 5000) * spread / 3
    seq = sequence(temperature=1.0, **options)
    with Calls("sort") as calls:
        got = probs_of(process_logits(raw, seq, [(), ()]))
    assert calls.count == sorts
    for row, ours in zip(raw, got, strict=True):
        theirs = transformers_probs(row, seq, (), warper)
        assert abs(int((ours > 0).sum()) - int((theirs > 0).sum())) <= 2  # their float32 sums drift
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


class Calls(TorchFunctionMode):
    """Counts the calls of one of Tensor's methods."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is getattr(Tensor, self.name)
        return func(*args, **(kwargs or {}))


def test_top_p_is_the_smallest_set_that_reaches_p():
    raw = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    for p, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.96, 4)):
        processed = process_logits(raw, sequence(temperature=1.0, top_p=p - 1e-12), [()])
        assert int(processed.isfinite().sum()) == kept


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    raw = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -50.0]])
    for options in ({"top_k": 2}, {"top_p": 0.6}):
        processed = process_logits(raw, sequence(temperature=1.0, **options), [()])
        assert processed.isfinite().tolist() == [[True, True, True, True, False, False]]


OPTIONS = {
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.4},
    "min_tokens": {"min_tokens": 5},
    "processor": {"logits_processors": (lambda tokens, row: row + sum(tokens) % 7 * torch.arange(VOCAB),)},
    "all": {
        "temperature": 0.7,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "min_tokens": 6,
        "logit_bias": {3: 2.0},
        "banned_token_ids": (8,),
        "top_p": 0.9,
        "min_p": 0.01,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_row_after_a_path_is_processed_as_if_the_path_were_text(options: Options):
    raw = logits()
    together = process_logits(raw, sequence(**options), PATHS)
    for r, path in enumerate(PATHS):
        alone = process_logits(raw[r : r + 1], sequence(OUTPUT + list(path), **options), [()])
        assert torch.equal(together[r], alone[0])
    assert not torch.equal(together, process_logits(raw, sequence(**options), [()] * len(PATHS)))


def test_penalties_by_hand():
    """Repetition counts the prompt, the others do not; a token drafted twice counts twice."""
    raw = torch.full((1, VOCAB), 2.0)
    raw[0, 31] = -2.0
    options = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    row = process_logits(raw, sequence(**options), [(11, 40, 11)])[0]
    wanted = {0: 2.0, 5: 1.0, 31: -4.0, 2: 1.0 - 0.75, 40: 1.0 - 1.0, 11: 1.0 - 1.0, 9: 1.0 - 0.75}
    for token, value in wanted.items():
        assert float(row[token]) == pytest.approx(value), token


def test_bias_comes_before_penalties_and_masks_come_last():
    raw = torch.zeros(1, VOCAB)

    def insist(tokens: object, row: Tensor) -> Tensor:
        assert float(row[9]) == 2.0  # biased to 4, then halved
        row[:] = 5.0
        return row

    seq = sequence(
        logit_bias={9: 4.0}, repetition_penalty=2.0, logits_processors=(insist,), allowed_token_ids=(8, 9, 10, 0)
    )
    assert process_logits(raw, seq, [()])[0].isfinite().nonzero().flatten().tolist() == [0, 8, 9, 10]
    banned = sequence(banned_token_ids=(1, 2), min_tokens=4)
    rows = process_logits(logits(2), banned, [(), (7,)])  # three tokens so far: only the first row is early
    assert (rows == -math.inf).nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 1], [1, 2]]


def test_ids_beyond_the_vocabulary_are_ignored():
    """A draft model may have fewer tokens than the target whose request it processes."""
    options = {"temperature": 1.0, "logit_bias": {90: 3.0}, "banned_token_ids": (99,), "frequency_penalty": 1.0}
    raw = logits(2)
    seq = sequence([95, 2], repetition_penalty=1.2, min_tokens=9, **options)
    seq.stop_ids = frozenset({77})
    same = sequence([2], repetition_penalty=1.2, temperature=1.0, frequency_penalty=1.0)
    assert torch.equal(process_logits(raw, seq, [(), (80,)]), process_logits(raw, same, [(), ()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"banned_token_ids": (1,)}, {"temperature": 1, "top_k": 2}]
)
def test_processing_returns_a_new_tensor_of_float32_or_finer(dtype: torch.dtype, options: Options):
    raw = logits().to(dtype)
    kept = raw.clone()
    processed = process_logits(raw, sequence(**options), PATHS)
    processed.fill_(0)
    assert torch.equal(raw, kept)
    assert processed.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-6, 1e-3])
def test_the_coldest_temperature_is_greedy(temperature: float):
    raw = logits() * 1000
    cold = probs_of(process_logits(raw, sequence(temperature=temperature), PATHS))
    assert torch.equal(cold, probs_of(raw, greedy=True))


def test_greedy_ignores_temperature_and_truncation_and_takes_the_lowest_id_among_equals():
    raw = torch.zeros(1, 5000)
    raw[0, [4000, 77, 1500]] = 1.0
    processed = process_logits(raw, sequence(top_k=1, top_p=0.1), [()])
    assert torch.equal(processed, raw)
    assert probs_of(processed, greedy=True).nonzero().tolist() == [[0, 77]]


def test_probs_of_is_a_float64_softmax():
    raw = logits()
    wanted = [[math.exp(x - max(row)) for x in row] for row in raw.tolist()]
    wanted = [[x / math.fsum(row) for x in row] for row in wanted]
    got = probs_of(raw)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)
    assert float((got.sum(-1) - 1).abs().max()) < 1e-14


def test_apply_temperature_takes_a_temperature_for_each_row():
    raw = logits(2)
    for row, temperature, got in zip(raw, (0.5, 2.0), apply_temperature(raw, [0.5, 2.0]), strict=True):
        torch.testing.assert_close(got, (row - row.max()) / temperature)


def test_a_row_that_leaves_nothing_is_nan_and_alone():
    raw = logits(3)
    raw[1, 5] = math.nan
    for options in ({"temperature": 1.0, "top_p": 0.9, "typical_p": 0.9, "top_k": 9, "min_p": 0.1}, {}):
        seq = sequence(**options)
        got = probs_of(process_logits(raw, seq, [()] * 3), greedy=seq.params.greedy)
        assert got.isnan().all(-1).tolist() == [False, True, False]
        good = probs_of(process_logits(raw[[0, 2]], seq, [()] * 2), greedy=seq.params.greedy)
        assert torch.equal(got[[0, 2]], good)


def test_no_token_error_says_what_is_wrong_and_where():
    row = logits(1)[0]
    broken = row.clone()
    broken[3] = math.nan
    assert "request 4 cannot go on at token 7: the model's logits are NaN" in str(no_token_error(broken, sequence()))
    seq = sequence(allowed_token_ids=(1,), banned_token_ids=(1,))
    assert "at token 7: no token is left to choose" in str(no_token_error(row, seq))

    def fails(tokens: object, row: Tensor) -> Tensor:
        raise KeyError("oops")

    seq = sequence(logits_processors=(lambda tokens, row: row, fails))
    assert "logits_processors[1] failed: KeyError: 'oops'" in str(no_token_error(row, seq))
    seq = sequence(logits_processors=(lambda tokens, row: row[:5],))
    assert "logits_processors[0] must return logits of shape (60,), got (5,)" in str(no_token_error(row, seq))


def test_a_processor_may_force_a_token_with_infinity():
    def force(tokens: object, row: Tensor) -> Tensor:
        row[12] = math.inf
        return row

    for options in ({}, {"temperature": 1.0}):
        seq = sequence(logits_processors=(force,), **options)
        got = probs_of(process_logits(logits(1), seq, [()]), greedy=seq.params.greedy)
        assert got[0, 12] == 1.0


@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data())
def test_token_logprobs_against_a_full_sort(data: st.DataObject):
    vocab = data.draw(st.integers(1, 12))
    values = st.floats(-30, 30, width=16)  # few enough values that ties happen
    rows = data.draw(st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=1, max_size=4))
    tokens = [data.draw(st.integers(0, vocab - 1)) for _ in rows]
    top = data.draw(st.integers(0, 20))
    for row, token, got in zip(rows, tokens, token_logprobs(torch.tensor(rows), tokens, top), strict=True):
        total = max(row) + math.log(math.fsum(math.exp(x - max(row)) for x in row))
        assert got.token == token
        assert got.logprob == pytest.approx(row[token] - total, abs=1e-4)
        assert got.rank == 1 + sum(x > row[token] for x in row)
        assert [round(x, 3) for _, x in got.top] == pytest.approx(
            sorted((x - total for x in row), reverse=True)[:top], abs=2e-3
        )
        assert [row[t] for t, _ in got.top] == sorted(row, reverse=True)[:top]
        assert [t for t, _ in got.top] == sorted((t for t, _ in got.top), key=lambda t: (-row[t], t))


def test_a_processor_with_a_state_of_its_own_is_named():
    calls = iter(range(100))

    def counting(tokens, logits):
        return logits + next(calls)

    seq = sequence([], logits_processors=(counting,))
    assert process_logits(torch.zeros(1, 8), seq, [()]).isnan().all()
    assert "two different results for the same tokens" in str(no_token_error(torch.zeros(8), seq))


def test_a_processor_that_changes_its_input_in_place_is_pure():
    def in_place(tokens, logits):
        logits[3] = 5.0
        return logits.mul_(2)

    seq = sequence([], logits_processors=(in_place,))
    assert process_logits(torch.zeros(1, 8), seq, [()])[0].tolist() == [0, 0, 0, 10, 0, 0, 0, 0]
