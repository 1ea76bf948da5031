"""An LLM over a synthetic pair: the engine as everyone uses it, with nothing on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.drafters.base import Drafter, DrafterConfig, DrafterContext, Traits
from outrider.drafters.registry import parse_drafter
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.models.decoder import Decoder
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import SyntheticPair

DRAFT_MODEL = "draft-model:model=synthetic"
"""The drafter that runs the pair's draft; options may follow, such as `,k=8`."""


@dataclass(frozen=True, slots=True)
class WithDraft:
    """A drafter's configuration whose draft model is at hand, whatever name it gives."""

    config: DrafterConfig
    draft: LoadedModel

    @property
    def traits(self) -> Traits:
        return self.config.traits

    def build(self, context: DrafterContext) -> Drafter:
        return self.config.build(replace(context, load_runner=lambda *_, **__: self.draft))


class Rig:
    """A pair with caches, to make LLMs of. Recorded passes are kept from one LLM to the next.

    One LLM of a rig runs at a time: they share the caches.
    """

    def __init__(self, pair: SyntheticPair, *, cache_tokens: int, context: int, pinned: bool = False) -> None:
        self.pair, self.context = pair, context

        def loaded(name: str, decoder: Decoder, tokens: int, pinned: bool) -> LoadedModel:
            target = NativeRunner(decoder, tokens, context=context, pinned=pinned)
            return LoadedModel(name, Path(name), target, pair.tokenizer, str(decoder.dtype).removeprefix("torch."))

        self.target = loaded("synthetic", pair.target, cache_tokens, pinned)
        # A draft runs some tokens ahead of the text, and is never asked to be pinned: guesses may be anything.
        self.draft = loaded("synthetic-draft", pair.draft, cache_tokens + cache_tokens // 8, False)

    def llm(self, spec: str | DrafterConfig = "none", **options: Any) -> LLM:
        """A fresh engine and a fresh drafter over the same weights, caches and recorded passes.

        `options` are those of LLM that concern the engine: mode, rule, max_batch, max_round_tokens.
        """
        config = parse_drafter(spec) if isinstance(spec, str) else spec
        return LLM(self.target, drafter=WithDraft(config, self.draft), **options)
