"""LLMs over a synthetic pair of models, with nothing on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.drafters.base import Drafter, DrafterConfig, DrafterContext, Traits, for_target
from outrider.drafters.registry import parse_drafter
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.models.decoder import Decoder
from outrider.runners.native import NativeRunner, decode_one
from outrider.runners.threads import threads_of
from outrider.testing.synthetic import SyntheticPair

DRAFT_MODEL = "draft-model:model=synthetic"
"""The drafter that runs the pair's draft model; options may follow, such as `,k=8`."""


@dataclass(frozen=True, slots=True)
class LoadedDraftConfig:
    """A drafter's configuration whose draft model is loaded already, whatever name it gives."""

    config: DrafterConfig
    draft: LoadedModel

    @property
    def traits(self) -> Traits:
        return self.config.traits

    def for_target(self, folder: Path) -> LoadedDraftConfig:
        return LoadedDraftConfig(for_target(self.config, folder), self.draft)

    def build(self, context: DrafterContext) -> Drafter:
        return self.config.build(replace(context, load_runner=lambda *_, **__: self.draft))


class LLMFactory:
    """Makes LLMs over the same pair. They share caches and captured graphs, so only one may run at a time."""

    def __init__(
        self,
        pair: SyntheticPair,
        *,
        cache_tokens: int,
        context: int,
        pinned: bool = False,
        threads: int | None = None,
    ) -> None:
        """The keywords are as in LoadOptions."""
        self.pair, self.context = pair, context

        def loaded(name: str, decoder: Decoder, tokens: int, pinned: bool) -> LoadedModel:
            chooser = threads_of(decoder.device, threads, lambda: decode_one(decoder))
            target = NativeRunner(decoder, tokens, context=context, pinned=pinned, threads=chooser)
            return LoadedModel(name, Path(name), target, pair.tokenizer, str(decoder.dtype).removeprefix("torch."))

        self.target = loaded("synthetic", pair.target, cache_tokens, pinned)
        # A draft model is some tokens ahead of the text, and need not be pinned: drafts may be anything.
        self.draft = loaded("synthetic-draft", pair.draft, cache_tokens + cache_tokens // 8, False)

    def llm(self, spec: str | DrafterConfig = "none", **options: Any) -> LLM:
        """A new engine and a new drafter over the same weights, caches and captured graphs.

        `options` are those of LLM for the engine: mode, rule, max_batch, max_round_tokens, adaptive (here off unless
        given, so that what is measured is what is named).
        """
        options.setdefault("adaptive", False)
        config = parse_drafter(spec) if isinstance(spec, str) else spec
        return LLM(self.target, drafter=LoadedDraftConfig(config, self.draft), **options)
