"""The testbed whose model is a toy: cheap, lively, and strict about its pages."""

from __future__ import annotations

from plain_decoding import World
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed

from outrider.testing.toy import ToyRunner


def target(cache_tokens: int = 4096, order: int = 2) -> ToyRunner:
    return ToyRunner(VOCAB, context=CONTEXT, cache_tokens=cache_tokens, order=order)


WORLD = World(target().logits_after, TOKENIZER, TOKENIZER.eos_ids, CONTEXT)
TOY = Testbed(WORLD, target, lambda name: target(64 if name == "cramped" else 4096, order=2 if name == "draft" else 1))
