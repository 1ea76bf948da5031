"""A toy engine to prove: a target of few likely tokens, and a draft model that is another toy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from outrider.core.sampling import Token
from outrider.drafters.base import DrafterContext, Traits
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.models.tokenizer import Tokenizer
from outrider.prove.checks import Check
from outrider.prove.journal import Journal, run_tasks
from outrider.prove.local import LocalProof, ProofSettings
from outrider.prove.settings import encode_prompts
from outrider.runners.base import Runner
from outrider.server.openai.token_texts import byte_alphabet
from outrider.testing.toy import ToyRunner

VOCAB, END = 257, 256
LIKELY = sorted(b"etaoin srhl.,")
BIAS = torch.full((VOCAB,), -9.0)
BIAS[LIKELY] = 0.0
PROMPTS = ("the rain in the tale is the rain", "a tin hat on the heather, a tin hat", "no one is there at the inn")


def make_tokenizer() -> Tokenizer:
    """One token a byte, and one that ends a text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, named={"eos_token": "<|end|>"}, templates={})


class FewLetters(ToyRunner):
    """Writes few different letters; scores depend on the last `order` tokens."""

    def __init__(self, order: int = 2) -> None:
        super().__init__(VOCAB, context=256, cache_tokens=8192, order=order)

    def _make_row(self, tail: tuple[Token, ...]) -> Tensor:
        return super()._make_row(tail) * 0.6 + BIAS


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyDraftConfig:
    """A draft model that is not far from the target: the same scores, less sure."""

    k: int = 3
    beams: int = 1
    blunt: float = 0.7
    """What its scores are multiplied by."""

    @property
    def traits(self) -> Traits:
        return DraftModelConfig(model="toy", k=self.k, beams=self.beams).traits

    def build(self, context: DrafterContext) -> DraftModel:
        return DraftModel(Blunt(self.blunt), context, DraftModelConfig(model="toy", k=self.k, beams=self.beams))


class Blunt(FewLetters):
    def __init__(self, blunt: float) -> None:
        super().__init__()
        self.blunt = blunt

    def _make_row(self, tail: tuple[Token, ...]) -> Tensor:
        return (super()._make_row(tail) - BIAS) * self.blunt + BIAS


def prove_toy(
    folder: Path,
    drafter: Any = "suffix",
    target: Runner | None = None,
    *,
    draws: int = 512,
    only: Callable[[str], bool] = lambda key: True,
    **options: Any,
) -> list[Check]:
    """The checks of a proof of the toy. only: which of its tasks run, by their keys."""
    loaded = LoadedModel("toy", folder, target or FewLetters(), make_tokenizer(), "float32")
    llm = LLM(loaded, drafter=drafter, adaptive=False, mode=options.get("modes", ("seeded",))[0])
    settings = ProofSettings(drafter=drafter, draws=draws, prompts=encode_prompts(llm, PROMPTS), **options)
    journal = Journal(folder, {"toy": 1})
    proof = LocalProof(llm, settings, journal)
    tasks = [task for task in proof.tasks() if only(task.key)]
    return run_tasks(tasks, journal, lambda key, done, total: None)


def failing(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "fails"]
