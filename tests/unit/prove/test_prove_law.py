"""The law by the book, against the package's own probabilities and against laws worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.prove.law import law_after
from outrider.prove.settings import cover_pairs, no_immediate_repeat, option_rows, option_values
from outrider.prove.stated_law import REST, Stated, stated_law
from outrider.verify.probs import probs_of, process_logits

VOCAB = 80
PROMPT, OUTPUT = (3, 4, 5, 3), (6, 7, 6)
ROWS = option_rows(option_values(list(range(40, 70)) + list(range(40)) + list(range(70, 80))))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_options_is_what_the_engine_computes(name: str):
    params = SamplingParams(**({"temperature": 1.0} | ROWS[name]))
    stops = frozenset(params.stop_token_ids)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(name))) * 3
    law = law_after(logits, params, PROMPT, OUTPUT, stops)
    seq = Sequence(0, [*PROMPT, *OUTPUT], len(PROMPT), params, 0, stops)
    ours = probs_of(process_logits(logits[None], seq, [()]))[0]
    assert law.margin > 1e-4
    assert torch.allclose(law.probs, ours, atol=1e-5)
    assert law.probs.gt(0).tolist() == ours.gt(0).tolist()


def test_greedy_is_certain_after_penalties_and_processors():
    logits = torch.tensor([1.0, 3.0, 2.9, 0.0])
    assert law_after(logits, SamplingParams(), (0,), (), frozenset()).probs.tolist() == [0, 1, 0, 0]
    penalised = law_after(logits, SamplingParams(presence_penalty=0.5), (0,), (1,), frozenset())
    assert penalised.probs.tolist() == [0, 0, 1, 0]
    processed = law_after(logits, SamplingParams(logits_processors=(no_immediate_repeat,)), (0, 1), (), frozenset())
    assert processed.probs.tolist() == [0, 0, 1, 0]


def test_a_cut_that_rounding_could_move_has_a_small_margin():
    logits = torch.tensor([2.0, 1.0, 1.0 + 1e-7, 0.0])
    assert law_after(logits, SamplingParams(temperature=1.0, top_k=2), (0,), (), frozenset()).margin < 1e-6
    assert law_after(logits, SamplingParams(temperature=1.0, top_k=3), (0,), (), frozenset()).margin > 0.5


def test_pairs_are_covered():
    names = list(option_values(range(64)))
    blocks = cover_pairs(names)
    together = {(a, b) for block in blocks for a in block for b in block}
    assert together >= {(a, b) for a in names for b in names}
    assert max(map(len, blocks)) <= 4
    assert len(blocks) < 20


TOP = {" a": math.log(0.5), " b": math.log(0.3), " c": math.log(0.1)}


def law(output: tuple[str, ...] = (), listed: int = 3, **options: Any) -> dict[str, float] | None:
    return stated_law(Stated(TOP, listed), output, options, 1e-3)


def test_what_is_not_listed_has_the_rest():
    assert law() == pytest.approx({" a": 0.5, " b": 0.3, " c": 0.1, REST: 0.1})


def test_truncation_within_what_is_listed():
    assert law(top_k=2) == pytest.approx({" a": 0.625, " b": 0.375})
    assert law(top_p=0.7) == pytest.approx({" a": 0.625, " b": 0.375})
    assert law(min_p=0.4) == pytest.approx({" a": 0.625, " b": 0.375})
    assert law(top_k=2, temperature=0.5) == pytest.approx({" a": 25 / 34, " b": 9 / 34})


def test_penalties_move_mass_to_the_rest():
    found = law((" a",), presence_penalty=math.log(2))
    assert found == pytest.approx({" a": 0.25 / 0.75, " b": 0.3 / 0.75, " c": 0.1 / 0.75, REST: 0.1 / 0.75})
    found = law((" b",), frequency_penalty=math.log(30))  # less likely than what is not listed may be
    assert found == pytest.approx({" a": 0.5 / 0.71, " c": 0.1 / 0.71, REST: 0.11 / 0.71})


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"top_p": 0.95}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.8}, {"listed": 4}],
    ids=str,
)
def test_a_law_that_does_not_follow_is_unknown(options: dict[str, Any]):
    """Of what is not listed, not enough is known; or a cut lies where rounding decides."""
    assert law(**options) is None


def test_penalties_on_unlisted_tokens_are_unknown():
    assert law((" z",), presence_penalty=1.0) is None


def test_parts_of_characters_are_part_of_the_rest():
    stated = Stated({**TOP, "\N{REPLACEMENT CHARACTER}": math.log(0.05)}, 5)
    assert stated_law(stated, (), {}, 1e-3) == pytest.approx({" a": 0.5, " b": 0.3, " c": 0.1, REST: 0.1})
    assert stated_law(stated, (), {"top_k": 2}, 1e-3) is None
