"""Drafts with a smaller model of another tokenizer than the target's, in tokens that both vocabularies have."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, ModelLoaded, RoundView, Traits
from outrider.drafters.draft_cache import DraftCache
from outrider.drafters.draft_model import fair_shares
from outrider.drafters.mean_accepted import MeanAccepted
from outrider.drafters.options import check_options
from outrider.models.vocab_map import VocabMap
from outrider.runners.base import Runner
from outrider.verify.base import Mode
from outrider.verify.draft_sampling import draft_token

MIN_SHARED = 256
"""Min tokens that two vocabularies must share: with fewer, hardly any text can be drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossModelConfig:
    """Draft with a smaller model that has another tokenizer than the target."""

    model: str = ""
    """Folder, Hugging Face id, .gguf file or `demo`."""
    k: int = 4
    """Tokens drafted a round."""
    device: str = ""
    """Where it runs; empty: on the target's device."""
    dtype: str = ""
    """float32, bfloat16 or float16; empty: as for a target."""
    quantize: str = ""
    """int4 or int8 on the CPU, or none; empty: as for a target."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("cross-model needs a model: cross-model:model=NAME, a smaller one of any tokenizer")
        check_options("cross-model", self, k=(1, 64))

    @property
    def traits(self) -> Traits:
        return Traits(
            name="cross-model",
            max_tokens=self.k,
            runs_model=True,
            states_probs=True,
            loads=(ModelLoaded(self.model, self.device),),
        )

    def build(self, context: DrafterContext) -> CrossModel:
        if context.load_runner is None:
            raise ConfigError("cross-model: no loader for models was given")
        loaded = context.load_runner(
            self.model, device=self.device or "", dtype=self.dtype or "auto", quantize=self.quantize or "auto"
        )
        runner: Runner = loaded.target
        vocab = VocabMap(context.tokenizer, loaded.tokenizer, context.vocab_size, runner.vocab_size)
        if len(vocab.shared) < min(MIN_SHARED, context.vocab_size // 2):
            raise ConfigError(
                f"cross-model: {self.model} and the target share {len(vocab.shared)} tokens; choose a model whose "
                "vocabulary is closer to the target's"
            )
        if not runner.rewinds:
            raise ConfigError(f"cross-model: {self.model} keeps a state that cannot be rolled back; choose another")
        for _ in runner.capture(context.max_batch, 2):
            pass
        return CrossModel(runner, vocab, context, self)


@dataclass(slots=True, eq=False)
class TranslatedText:
    """A sequence's text in the draft model's tokens, as `DraftCache` reads it."""

    id: int
    salt: str
    tokens: list[Token]
    translated: int = 0
    """The number of the target's tokens that are translated."""


class CrossModel(Drafter):
    """Proposes what the draft model would choose next among the tokens that both vocabularies have.

    A text is translated token by token as it grows; a token that only the target has is spelled with several of the
    draft model's. Logits of shared tokens are moved to the target's ids, so that all options, the seed and the noise
    apply as to a draft model with the target's tokenizer, and probabilities are stated over the target's vocabulary. A
    text is read when a draft for it is first asked for: at most `max_round_tokens` a round for all sequences.
    """

    def __init__(self, model: Runner, vocab: VocabMap, context: DrafterContext, config: CrossModelConfig) -> None:
        self.model, self.vocab, self.config, self.traits = model, vocab, config, config.traits
        self.step_model = model
        self.mode: Mode = context.mode
        self.target_vocab, self.max_round_tokens = context.vocab_size, context.max_round_tokens
        self.cache = DraftCache(model, model.vocab_size, config.k)
        self._targets = torch.tensor(list(vocab.shared), dtype=torch.int64, device=model.device)
        self._drafts = torch.tensor(list(vocab.shared.values()), dtype=torch.int64, device=model.device)
        self._texts: dict[int, TranslatedText] = {}
        self._accepted = MeanAccepted(1.0)

    def propose(self, view: RoundView) -> list[Draft]:
        drafts = [EMPTY] * len(view.seqs)
        rooms: dict[int, int] = {}
        for i, (seq, budget) in enumerate(zip(view.seqs, view.budgets, strict=True)):
            if budget > 0:
                text = self._translate(seq)
                rooms[i] = self.cache.make_room(text, min(budget, self.config.k)) if text.tokens else 0
        rows = self._read_on(view.seqs, [i for i, room in rooms.items() if room])
        for i, draft in zip(rows, self._chains([view.seqs[i] for i in rows], [rooms[i] for i in rows]), strict=True):
            drafts[i] = draft
        return drafts

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        self._accepted.note(drafts, verdicts)

    def forget(self, seq: Sequence) -> None:
        text = self._texts.pop(seq.id, None)
        if text is not None:
            self.cache.drop(text)

    def _translate(self, seq: Sequence) -> TranslatedText:
        """The sequence's translated text, brought up to date."""
        text = self._texts.get(seq.id)
        if text is None:
            text = self._texts[seq.id] = TranslatedText(seq.id, seq.salt, [*self.vocab.beginning])
        text.tokens += self.vocab.translate(seq.tokens[text.translated :])
        text.translated = len(seq.tokens)
        return text

    def _read_on(self, seqs: Seq[Sequence], rows: list[int]) -> list[int]:
        """The rows that can be drafted for in this round; the texts of the others are read as far as it allows."""
        texts = [self._texts[seqs[i].id] for i in rows]
        missing = [len(text.tokens) - self.cache.length(text) for text in texts]
        shares = fair_shares(missing, self.max_round_tokens)
        short = [share < count for share, count in zip(shares, missing, strict=True)]
        self.cache.read([(text, share) for text, share, late in zip(texts, shares, short, strict=True) if late])
        return [i for i, late in zip(rows, short, strict=True) if not late]

    def _chains(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Draft for all sequences one token at a time: one batched pass for each step."""
        paths: list[tuple[Token, ...]] = [()] * len(seqs)  # in the target's tokens
        stated: list[list[Tensor]] = [[] for _ in seqs]
        active = range(len(seqs))
        for step in range(max(budgets, default=0)):
            # a token that only the target has, drawn where no shared one is allowed, ends its draft
            active = [i for i in active if step < budgets[i] and all(token in self.vocab.shared for token in paths[i])]
            if not active:
                break
            own = [tuple(self.vocab.shared[token] for token in paths[i]) for i in active]
            logits = self.cache.advance([(self._texts[seqs[i].id], path) for i, path in zip(active, own, strict=True)])
            drawn, probs = draft_token(
                self._to_target(logits), [seqs[i] for i in active], [paths[i] for i in active], self.mode
            )
            for row, i in enumerate(active):
                paths[i] = (*paths[i], drawn[row])
                if probs is not None and not seqs[i].params.greedy:
                    stated[i].append(probs[row])
        return [self._draft(path, probs) for path, probs in zip(paths, stated, strict=True)]

    def _to_target(self, logits: Tensor) -> Tensor:
        """The draft model's logits [R, its vocab] -> [R, the target's], -inf for tokens that it does not have"""
        wide = logits.new_full((len(logits), self.target_vocab), float("-inf"))
        return wide.index_copy_(1, self._targets, logits[:, self._drafts])

    def _draft(self, tokens: tuple[Token, ...], probs: Seq[Tensor]) -> Draft:
        stated = torch.stack([*probs]) if probs else None
        return Draft(tokens, None, stated, self.traits.name, min(self._accepted.value, len(tokens)))
