"""A smaller model of the same tokenizer guesses ahead, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.sampling import MAX_TOKENS, Token, is_whole
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext, ModelLoaded
from outrider.drafters.draft_cache import DraftCache
from outrider.drafters.draft_tree import Trees, chances_of
from outrider.drafters.options import check_options
from outrider.drafters.reduced_vocab import MIN_TOKENS, read_ranking, reduce_vocab
from outrider.models.tokenizer import check_same_vocabulary
from outrider.runners.base import ChainStart, Runner
from outrider.runners.device_state import DeviceState
from outrider.verify.base import Mode
from outrider.verify.propose import draft_token


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """Draft with a smaller model that shares the target's tokenizer."""

    model: str = ""
    """Folder, Hugging Face id, .gguf file or `demo`."""
    k: int = 5
    """Tokens drafted a round."""
    beams: int = 1
    """Branches kept at each step; more than 1 drafts a tree."""
    min_prob: float = 0.0
    """Stop after a token the draft model gave less than this; for chains, not trees."""
    device: str = ""
    """Where it runs; empty: beside the target."""
    dtype: str = ""
    """float32, bfloat16 or float16; empty: as for a target."""
    quantize: str = ""
    """int4 or int8 on the CPU, or none; empty: as for a target."""
    vocab: int = 0
    """Say only so many tokens, frequent or seen lately, which is faster; 0: all."""
    ranking: str = ""
    """JSON file of token ids, most frequent first; empty: in the order of ids."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("draft-model needs a model: draft-model:model=NAME, a smaller one of the same tokenizer")
        check_options("draft-model", self, k=(1, 64), beams=(1, 64), min_prob=(0.0, 1.0))
        if self.min_prob is None:  # where other drafters choose for themselves
            raise ConfigError("draft-model: min_prob must be a number, got None; 0 never stops early")
        if self.beams > 1 and self.min_prob:
            raise ConfigError(
                f"draft-model: min_prob={self.min_prob} ends chains and beams={self.beams} drafts trees, which grow "
                "where the draft model is surest anyway; leave one of them out"
            )
        if not is_whole(self.vocab) or (self.vocab and not MIN_TOKENS <= self.vocab <= MAX_TOKENS):
            raise ConfigError(f"draft-model: vocab must be 0 or {MIN_TOKENS} to {MAX_TOKENS}, got {self.vocab!r}")
        if self.ranking and not self.vocab:
            raise ConfigError("draft-model: ranking orders what vocab keeps; give vocab too, such as vocab=32768")

    @property
    def loads(self) -> tuple[ModelLoaded, ...]:
        return (ModelLoaded(self.model, self.device, self.vocab),)

    @property
    def max_tokens(self) -> int:
        return self.k * self.beams

    def build(self, setting: DrafterContext) -> DraftModel:
        if setting.load_runner is None:
            raise ConfigError("draft-model: no loader for models was given")
        ranking = read_ranking(self.ranking, setting.vocab_size)
        loaded = setting.load_runner(
            self.model, device=self.device or "", dtype=self.dtype or "auto", quantize=self.quantize or "auto"
        )
        check_same_vocabulary(setting.tokenizer, loaded.tokenizer, setting.vocab_size, loaded.target.vocab_size)
        if not loaded.target.rewinds:
            raise ConfigError(
                f"draft-model: {self.model} keeps a state that cannot be rolled back; choose another draft model"
            )
        if loaded.target.context < setting.context:
            raise ConfigError(
                f"draft-model: {self.model} was made for {loaded.target.context} tokens and the target serves texts of "
                f"up to {setting.context}: give the target context={loaded.target.context}, or choose another draft"
            )
        drafter = DraftModel(loaded.target, setting, self, ranking)
        for _ in loaded.target.prepare(setting.max_batch, 2, steps=self.k if self.beams == 1 else 0):
            pass
        return drafter


class DraftModel:
    """Proposes what the draft model would say next, by the same options, seed and noise as the target.

    Its state is what its cache holds of each text, see `DraftCache`.
    """

    name = "draft-model"
    dear = True

    def __init__(
        self, model: Runner, setting: DrafterContext, config: DraftModelConfig, ranking: Seq[Token] = ()
    ) -> None:
        """ranking: tokens, the most frequent first, where `config.vocab` leaves some out; the rest rank by id."""
        self.model, self.config = model, config
        self.mode: Mode = setting.mode
        self.target_vocab, self.vocab_size = setting.vocab_size, min(setting.vocab_size, model.vocab_size)
        self.max_tokens = config.max_tokens
        self.cache = DraftCache(model, self.vocab_size, self.max_tokens)
        self._trees = Trees(self.cache, config.k, config.beams, self.mode)
        self._usual = 1.0
        """Tokens that stood of late, on average over rounds."""
        ends = sorted(getattr(setting.tokenizer, "eos_ids", ()))  # rare, but sure to come once in a text
        self._frequent = reduce_vocab(model, config.vocab, (*ends, *ranking), self.vocab_size)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        if self._frequent is not None:
            self._frequent.note(seqs)
        if self.config.beams > 1 and self.model.scores_trees:
            return [self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        budgets = [min(budget, self.config.k) for budget in budgets]
        return self._at_once(seqs, budgets) or self._chains(seqs, budgets)

    def follow(self, seqs: Seq[Sequence], budgets: Seq[int], standing: DeviceState) -> list[Draft] | None:
        """Chains behind chains: all the draft model has not read yet are a text's last two tokens, at most.

        None where a text that may be drafted for has no chain in flight: `propose` begins one.
        """
        if standing.lengths.device != self.model.device:
            return None
        if self._frequent is not None:
            self._frequent.note(seqs)
        cache, room = self.cache, 1 + 2 * self.config.k  # the round in flight may bring a token and every guess
        rows = [i for i, s in enumerate(seqs) if budgets[i] and (s.id not in cache or cache.reserve(s, room))]
        if not all(cache.has_chain(seqs[i]) for i in rows):
            return None
        drafts = [EMPTY] * len(seqs)
        if rows:
            starts = [ChainStart(seq.id, seq.seed, seq.params.temperature) for seq in (seqs[i] for i in rows)]
            chains = self.model.draft_chains(starts, self.config.k, standing.take(rows))
            for i, chain in zip(rows, chains or (), strict=True):
                cache.chain_behind(seqs[i], chain)
                drafts[i] = self._whole(chain, budgets[i])
        return drafts

    def _whole(self, chain: Seq[Token], budget: int) -> Draft:
        """A chain drafted on the device, as far as it may be used."""
        return replace(self._draft(chain, []), known=True).first_nodes(budget)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Note how many stood; the committed text itself says which cached tokens still hold."""
        self.cache.land(seqs)
        for draft, verdict in zip(drafts, verdicts, strict=True):
            if len(draft):
                self._usual += 0.05 * (verdict.accepted - self._usual)

    def forget(self, seq: Sequence) -> None:
        self.cache.drop(seq)
        if self._frequent is not None:
            self._frequent.forget(seq)

    def _at_once(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft] | None:
        """Whole chains drafted on the device, where model, requests and room allow it; None: step by step.

        They go by temperature and noise alone. A guess that top-k, top-p or the like would have ruled out is
        refused by the target: about one in ten at top_p 0.9. To cut each step's law would be a sort of its logits more.

        All texts or none: one that must go step by step takes a pass for every guess, in which the others come along
        at hardly any cost. Chains for those would be passes more.
        """
        k = self.config.k
        simple = self.mode == "seeded" and not self.config.min_prob and min(budgets, default=0) > 0
        fits = self.model.launches and self.model.vocab_size <= self.target_vocab
        if not (simple and fits) or not all(seq.untouched and len(seq.tokens) > 1 for seq in seqs):
            return None
        if not all(self.cache.hold(seq, k) == k for seq in seqs):
            return None
        self.cache.catch_up(seqs)
        starts = [
            ChainStart(s.id, s.seed, s.params.temperature, len(s.tokens), (s.tokens[-2], s.tokens[-1])) for s in seqs
        ]
        chains = self.model.draft_chains(starts, k)
        if chains is None:
            return None
        for seq, chain in zip(seqs, chains, strict=True):
            self.cache.chain(seq, chain)
        return [self._whole(chain, budget) for chain, budget in zip(chains, budgets, strict=True)]

    def _chains(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """All sequences a token at a time, one batched pass a step."""
        guesses: list[list[Token]] = [[] for _ in seqs]
        chances: list[list[float]] = [[] for _ in seqs]
        laws: list[list[Any]] = [[] for _ in seqs]
        rooms = [self.cache.hold(seq, budget) if budget > 0 else 0 for seq, budget in zip(seqs, budgets, strict=True)]
        for step in range(max(rooms, default=0)):
            active = [i for i, room in enumerate(rooms) if step < room and self._worth(chances[i])]
            if not active:
                break
            paths = [tuple(guesses[i]) for i in active]
            logits = self.cache.advance([(seqs[i], path) for i, path in zip(active, paths, strict=True)])
            tokens, probs = draft_token(logits, [seqs[i] for i in active], paths, self.mode)
            sure = chances_of(logits, tokens) if self.config.min_prob else [1.0] * len(tokens)
            for row, i in enumerate(active):
                guesses[i].append(tokens[row])
                chances[i].append(sure[row])
                if probs is not None and not seqs[i].params.greedy:  # greedy beside sampled: as alone, without laws
                    laws[i].append(self._widen(probs[row]))
        return [self._draft(tuple(tokens), each) for tokens, each in zip(guesses, laws, strict=True)]

    def _worth(self, chances: list[float]) -> bool:
        """Whether to go on after the tokens so far: decided by them, never by the one to come."""
        return not chances or chances[-1] >= self.config.min_prob

    def _draft(self, tokens: Seq[Token], laws: list[Any]) -> Draft:
        return Draft(tokens, None, torch.stack(laws) if laws else None, self.name, self._expect(len(tokens)))

    def _expect(self, drafted: int) -> float:
        """How many tokens are expected to stand: what stood of late, and no more than were drafted.

        Not a function of the tokens' own chances: in mode `distribution` what was sampled may not
        decide whether the sample is used.
        """
        return min(self._usual, drafted)

    def _tree(self, seq: Sequence, budget: int) -> Draft:
        """A draft with several tokens for one place, no larger than there is room for."""
        room = self.cache.hold(seq, min(budget, self.max_tokens)) if budget > 0 else 0
        if not room:
            return EMPTY
        tree = self._trees.grow(seq, room)
        laws = [self._widen(node.law) for node in tree if node.law is not None]  # of all of them, or of none
        tokens, parents = tuple(node.token for node in tree), tuple(node.parent for node in tree)
        return Draft(tokens, parents, torch.stack(laws) if laws else None, self.name, self._expect(len(tree)))

    def _widen(self, law: torch.Tensor) -> torch.Tensor:
        """A law over the target's whole vocabulary, where its rows are padded further than the draft's."""
        return torch.nn.functional.pad(law, (0, self.target_vocab - len(law)))
