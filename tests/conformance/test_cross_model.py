"""A draft model with another tokenizer: the same model with a shuffled vocabulary drafts as the model itself would."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_models import make_model, native_testbed, save
from drafter_cast import LoadedDraft, Loud
from plain_decoding import assert_same, request, run
from testbed import CONTEXT, EOS, PIECES, TOKENIZER, VOCAB, PieceTokenizer

from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.drafters.base import DrafterContext
from outrider.drafters.cross_model import CrossModelConfig
from outrider.engine.engine import Engine
from outrider.models.load import load_decoder
from outrider.runners.native import NativeRunner
from outrider.verify.base import make_verifier

ORDER = random.Random(3).sample(range(VOCAB), VOCAB)  # draft id -> target id

NAMED: dict[str, Any] = {"ignore_eos": True, "banned_token_ids": (PIECES.index("", 1),)}
"""Leaves out the one token that stands for nothing, and so for nothing in the other vocabulary."""


class ShuffledTokenizer(PieceTokenizer):
    """The same pieces by other ids."""

    tokens = tuple(PIECES[i] for i in ORDER)
    token_bytes = tuple(PIECES[i].encode() for i in ORDER)
    eos_ids = frozenset({ORDER.index(EOS)})

    def encode(self, text: str, *, special: bool = True, allow_special_tokens: bool = True) -> list[Token]:
        return [self.tokens.index(char) for char in text]

    def decode(self, ids: Seq[Token]) -> str:
        return "".join(self.tokens[i] for i in ids)


def shuffled(folder: Path) -> NativeRunner:
    """The target's own weights, its rows of embedding and head in the shuffled order."""
    model = make_model("llama")
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight.copy_(weight[ORDER])
    return NativeRunner(load_decoder(save(model, folder / "shuffled"), device="cpu"), 2048)


def context(folder: Path, mode: Any = "seeded") -> DrafterContext:
    runner, tokenizer = shuffled(folder), ShuffledTokenizer()
    return DrafterContext(
        vocab_size=VOCAB,
        context=CONTEXT,
        mode=mode,
        tokenizer=TOKENIZER,
        eos_ids=TOKENIZER.eos_ids,
        load_runner=lambda model, **_: LoadedDraft(runner, tokenizer),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_draft_of_the_same_model_is_accepted(tmp_path: Path, temperature: float):
    bed = native_testbed("llama")
    drafter = CrossModelConfig(model="shuffled", k=4).build(context(tmp_path))
    engine = Engine(bed.target(4096), Loud(drafter), make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids)
    asked = request(range(1, 9), max_tokens=41, temperature=temperature, seed=3, **NAMED)
    assert_same(run(engine, [asked])[0], bed.judged(asked))
    tally = engine.stats.drafters["cross-model"]
    assert tally.rejected == 0
    assert tally.accepted > 25


def test_mode_distribution_states_probabilities_over_the_targets_vocabulary(tmp_path: Path):
    bed = native_testbed("llama")
    drafter: Any = CrossModelConfig(model="shuffled", k=3).build(context(tmp_path, "distribution"))
    seen: list[Any] = []
    propose = drafter.propose

    def watched(view: Any) -> Any:
        drafts = propose(view)
        seen.extend(draft for draft in drafts if len(draft))
        return drafts

    drafter.propose = watched
    engine = Engine(bed.target(4096), drafter, make_verifier("distribution"), TOKENIZER, eos_ids=TOKENIZER.eos_ids)
    run(engine, [request(range(1, 9), max_tokens=30, temperature=1.0, seed=5, **NAMED)])
    assert seen
    for draft in seen:
        assert draft.probs.shape == (len(draft), VOCAB)
        assert torch.allclose(draft.probs.sum(-1), torch.ones(len(draft), dtype=torch.float64))
        assert all(draft.probs[i, token] > 0 for i, token in enumerate(draft.tokens))
    assert engine.stats.drafters["cross-model"].rejected == 0  # the same law


def test_vocabularies_with_hardly_a_token_in_common_are_refused(tmp_path: Path):
    class Foreign(ShuffledTokenizer):
        tokens = tuple(f"x{i}" for i in range(VOCAB))
        token_bytes = tuple(token.encode() for token in tokens)

    told = context(tmp_path)
    foreign = replace(told, load_runner=lambda model, **_: LoadedDraft(shuffled(tmp_path), Foreign()))
    with pytest.raises(ConfigError, match="share 1 tokens"):
        CrossModelConfig(model="foreign").build(foreign)
