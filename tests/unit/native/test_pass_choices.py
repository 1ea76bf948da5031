"""Choices that a pass of the CPU kernels makes: those that the verifier makes of its logits."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import gguf
import pytest
import torch
from torch import Tensor

from outrider.checkpoints.resolve import resolve
from outrider.core.draft import EMPTY, Draft
from outrider.core.draws import Draws
from outrider.core.sampling import NO_TOKEN, SamplingParams
from outrider.core.sequence import Sequence, Span
from outrider.models.load import load_decoder
from outrider.native.library import Library
from outrider.runners.native import NativeRunner
from outrider.verify.seeded import SeededVerifier, choose_tokens

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from tiny_gguf import random_model, write_gguf

TREE = Draft(tokens=(7, 8, 9, 7, 11), parents=(-1, -1, 0, 2, 1))
VOCAB = 20_000  # some columns beyond two parts of a row


@pytest.fixture(autouse=True)
def own_home(native: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `native`: the kernels are not built anew."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


def runner_of(folder: Path) -> NativeRunner:
    write_gguf(folder / "m.gguf", random_model("llama", vocab_size=VOCAB), kind=gguf.GGMLQuantizationType.Q4_1)
    return NativeRunner(load_decoder(resolve(str(folder / "m.gguf")), device="cpu", quantize="int4"), 512)


def sequences(temperatures: list[float]) -> list[Sequence]:
    random = Random(5)
    return [
        Sequence(
            i, [random.randrange(VOCAB) for _ in range(9 + i)], 4, SamplingParams(temperature=t), (1 << 63) + 17 * i
        )
        for i, t in enumerate(temperatures)
    ]


def choose(runner: NativeRunner, seqs: list[Sequence], drafts: list[Draft]) -> tuple[Tensor, list[int]]:
    """The logits and the pass's own choices, behind texts of which all but the last token is read."""
    spans: list[Span] = []
    for seq, draft in zip(seqs, drafts, strict=True):
        last = len(seq.tokens) - 1
        if seq.id not in runner.pool:
            runner.pool.open(seq.id, ())
            runner.pool.reserve(seq.id, last + 1 + len(TREE))
            runner.score([Span(seq.id, 0, tuple(seq.tokens[:last]))])
        spans.append(Span(seq.id, last, tuple(seq.tokens[last:]), draft))
    draws = SeededVerifier().draws(seqs)
    assert draws is not None
    scores = runner.score_and_choose(spans, None, draws)
    assert scores.choices is not None
    return scores.logits, scores.choices.tolist()


@pytest.mark.parametrize("temperatures", [[0.0, 0.0, 0.0], [0.0, 1.0, 0.7], [1e-9, 0.3, 5.0]])
def test_choices_are_the_verifiers(kernels: Library, temperatures: list[float], tmp_path: Path):
    runner, seqs = runner_of(tmp_path), sequences(temperatures)
    drafts = [EMPTY, TREE, Draft(tokens=(3, 4, 5))]
    logits, chosen = choose(runner, seqs, drafts)
    assert chosen == [token for each in choose_tokens(logits, seqs, drafts) for token in each]
    assert len(set(chosen)) > 1


def test_noise_takes_all_tokens_into_account(kernels: Library, tmp_path: Path):
    """At a high temperature the choice is mostly noise: no chunk of columns may be left out wrongly."""
    runner = runner_of(tmp_path)
    seqs = sequences([50.0] * 6)
    chosen = set[int]()
    for round_ in range(8):
        for seq in seqs:
            seq.seed = 1000 * round_ + seq.id
        logits, own = choose(runner, seqs, [EMPTY] * len(seqs))
        assert own == [token for each in choose_tokens(logits, seqs, [EMPTY] * len(seqs)) for token in each]
        chosen.update(own)
    assert max(chosen) > VOCAB * 0.8 > VOCAB * 0.2 > min(chosen)


def test_rows_that_are_no_numbers_have_no_choice(kernels: Library, tmp_path: Path):
    runner, seqs = runner_of(tmp_path), sequences([0.0, 1.0, 0.0, 1.0])
    choose(runner, seqs, [EMPTY] * 4)
    keys, _ = runner.model.caches[0]
    for seq in seqs[:2]:
        keys[runner.pool.table(seq.id)[0] * runner.pool.size] = torch.nan
    logits, chosen = choose(runner, seqs, [EMPTY] * 4)
    assert chosen[:2] == [NO_TOKEN, NO_TOKEN]
    assert chosen[2:] == [token for each in choose_tokens(logits[2:], seqs[2:], [EMPTY] * 2) for token in each]


def test_draws_of_the_best_token_need_no_seeds(kernels: Library, tmp_path: Path):
    runner, seqs = runner_of(tmp_path), sequences([0.0])
    span = Span(seqs[0].id, 0, tuple(seqs[0].tokens))
    runner.pool.open(span.seq_id, ())
    runner.pool.reserve(span.seq_id, span.width)
    scores = runner.score_and_choose([span], None, Draws([-1], [0.0]))
    assert scores.choices is not None
    assert scores.choices.tolist() == [int(scores.logits[0].argmax())]
