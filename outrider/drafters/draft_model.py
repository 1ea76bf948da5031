"""A smaller model of the same tokenizer drafts, with a cache of its own."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.sampling import MAX_TOKENS, Token, is_int
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, ModelLoaded, RoundView, TargetPass, Traits
from outrider.drafters.beam_search import BeamSearch, token_probs
from outrider.drafters.draft_cache import DraftCache
from outrider.drafters.mean_accepted import MeanAccepted
from outrider.drafters.options import check_options
from outrider.drafters.reduced_vocab import MIN_TOKENS, read_ranking, reduce_vocab
from outrider.models.tokenizer import check_same_vocabulary
from outrider.runners.base import ChainStart, Runner
from outrider.runners.device_state import DeviceState
from outrider.verify.base import Mode
from outrider.verify.draft_sampling import draft_token


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
    """Stop after a token whose probability the draft model puts below this; for chains, not trees."""
    device: str = ""
    """Where it runs; empty: on the target's device."""
    dtype: str = ""
    """float32, bfloat16 or float16; empty: as for a target."""
    quantize: str = ""
    """int4 or int8 on the CPU, or none; empty: as for a target."""
    vocab: int = 0
    """Draft only from so many tokens, frequent or seen lately, which is faster; 0: from all."""
    ranking: str = ""
    """JSON file of token ids, most frequent first; empty: in the order of ids."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("draft-model needs a model: draft-model:model=NAME, a smaller one of the same tokenizer")
        check_options("draft-model", self, k=(1, 64), beams=(1, 64), min_prob=(0.0, 1.0))
        if self.min_prob is None:  # other drafters choose a value for None
            raise ConfigError("draft-model: min_prob must be a number, got None; 0 never stops early")
        if self.beams > 1 and self.min_prob:
            raise ConfigError(
                f"draft-model: min_prob={self.min_prob} ends chains and beams={self.beams} drafts trees, which grow "
                "where the draft model is surest anyway; leave one of them out"
            )
        if not is_int(self.vocab) or (self.vocab and not MIN_TOKENS <= self.vocab <= MAX_TOKENS):
            raise ConfigError(f"draft-model: vocab must be 0 or {MIN_TOKENS} to {MAX_TOKENS}, got {self.vocab!r}")
        if self.ranking and not self.vocab:
            raise ConfigError("draft-model: ranking orders what vocab keeps; give vocab too, such as vocab=32768")

    @property
    def traits(self) -> Traits:
        return Traits(
            name="draft-model",
            max_tokens=self.k * self.beams,
            runs_model=True,
            drafts_ahead=self.beams == 1 and not self.min_prob,
            pays_budget=self.beams == 1 and not self.min_prob,
            follows_target=True,
            ignores_scores=True,
            states_probs=True,
            loads=(ModelLoaded(self.model, self.device, self.vocab),),
        )

    def build(self, context: DrafterContext) -> DraftModel:
        if context.load_runner is None:
            raise ConfigError("draft-model: no loader for models was given")
        ranking = read_ranking(self.ranking, context.vocab_size)
        loaded = context.load_runner(
            self.model, device=self.device or "", dtype=self.dtype or "auto", quantize=self.quantize or "auto"
        )
        runner: Runner = loaded.target
        check_same_vocabulary(context.tokenizer, loaded.tokenizer, context.vocab_size, runner.vocab_size)
        if not runner.rewinds:
            raise ConfigError(
                f"draft-model: {self.model} keeps a state that cannot be rolled back; choose another draft model"
            )
        if runner.context < context.context:
            raise ConfigError(
                f"draft-model: {self.model} was made for {runner.context} tokens and the target serves texts of "
                f"up to {context.context}: give the target context={runner.context}, or choose another draft"
            )
        drafter = DraftModel(runner, context, self, ranking)
        drafter.capture(context.max_batch)
        return drafter


class DraftModel(Drafter):
    """Proposes what the draft model would choose next, by the same options, seed and noise as the target.

    Its state is what its cache holds of each text, see `DraftCache`. A request's first token never waits for the draft
    model to read the prompt: an asynchronous model reads it in a pass launched behind the target's, another one when a
    draft is first asked for. It reads at most `max_round_tokens` a round for all sequences, so that none waits long for
    another. A sequence whose text is not read by then gets no draft, and reading continues in the next round.
    """

    def __init__(
        self, model: Runner, context: DrafterContext, config: DraftModelConfig, ranking: Seq[Token] = ()
    ) -> None:
        """ranking: the most frequent tokens first, for a vocabulary reduced by `config.vocab`; the rest rank by id."""
        self.model, self.config, self.traits = model, config, config.traits
        self.step_model = model
        self.mode: Mode = context.mode
        self.target_vocab, self.max_round_tokens = context.vocab_size, context.max_round_tokens
        self.cache = DraftCache(model, context.vocab_size, self.traits.max_tokens)
        self._beam_search = BeamSearch(self.cache, config.k, config.beams, self.mode)
        self._chain_lengths = chain_lengths(config.k)
        self.lengths = tuple(self._chain_lengths) if model.asynchronous else ()
        self._left = self.max_round_tokens
        """Tokens of text that may still be read in this round."""
        self._accepted = MeanAccepted(1.0)
        ends = sorted(context.eos_ids)  # rare, but sure to come once in a text
        self._vocab = reduce_vocab(model, config.vocab, (*ends, *ranking), self.cache.vocab_size)

    def capture(self, batch: int) -> None:
        """Capture the passes of rounds of up to `batch` sequences, and chains of every length."""
        chains = self._chain_lengths if self.traits.drafts_ahead and self.mode == "seeded" else ()
        for _ in (*self.model.capture(batch, 2), *self.model.capture_chains(batch, chains)):
            pass

    def process(self, work: TargetPass) -> None:
        """Launch a pass that reads prompts, behind the target's; a synchronous model reads in `propose`."""
        if not self.model.asynchronous:
            return
        along: list[tuple[Sequence, int]] = []
        for seq, span in zip(work.seqs, work.spans, strict=True):
            reads = len(span.tokens) > 1 and seq.max_draft != 0 and seq.finish is None
            if reads and self.cache.make_room(seq, 1):
                end = min(span.start + len(span.tokens), len(seq.tokens) - 1)
                along.append((seq, max(0, end - self.cache.length(seq))))
        shares = fair_shares([count for _, count in along], self.max_round_tokens)
        self._left = self.max_round_tokens - sum(shares)
        self.cache.read([(seq, share) for (seq, _), share in zip(along, shares, strict=True)])

    def propose(self, view: RoundView) -> list[Draft] | None:
        if self._vocab is not None:
            self._vocab.note(view.seqs)
        self.cache.complete(view.seqs)  # of a round that `observe` did not see
        if view.state is not None:
            return self._after(view, view.state)
        drafts = [EMPTY] * len(view.seqs)
        trees = self.config.beams > 1 and self.model.scores_trees
        most = self.traits.max_tokens if trees else self.config.k
        rooms = [
            self.cache.make_room(seq, min(budget, most)) if budget > 0 else 0
            for seq, budget in zip(view.seqs, view.budgets, strict=True)
        ]
        rows = self._read_on(view.seqs, [i for i, room in enumerate(rooms) if room])
        seqs, rooms = [view.seqs[i] for i in rows], [rooms[i] for i in rows]
        if trees:
            made = [self._tree(seq, room) for seq, room in zip(seqs, rooms, strict=True)]
        else:
            made = self._chains_on_device(seqs, rooms) or self._chains(seqs, rooms)
        for i, draft in zip(rows, made, strict=True):
            drafts[i] = draft
        return drafts

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Note how many tokens were accepted; the committed text itself shows which cached tokens are still valid."""
        self.cache.complete(seqs)
        self._accepted.note(drafts, verdicts)

    def forget(self, seq: Sequence) -> None:
        self.cache.drop(seq)
        if self._vocab is not None:
            self._vocab.forget(seq)

    def _read_on(self, seqs: Seq[Sequence], rows: list[int]) -> list[int]:
        """The rows that can be drafted for in this round; the texts of the others are read as far as it allows.

        A text's last two tokens are read whatever a round allows, as the target does.
        """
        missing = [len(seqs[i].tokens) - self.cache.length(seqs[i]) for i in rows]
        shares = fair_shares(missing, self._left)
        self._left = self.max_round_tokens
        parts = list(zip(rows, missing, shares, strict=True))
        self.cache.read([(seqs[i], share) for i, count, share in parts if count > max(share, 2)])
        return [i for i, count, share in parts if count <= max(share, 2)]

    def _after(self, view: RoundView, state: DeviceState) -> list[Draft] | None:
        """Draft chains behind the round in flight, where the draft model then lacks only a text's last two tokens.

        That holds behind a chain of its own, and for a text without a draft, which gains one token and is read up to
        there first. None where another drafter's draft is in flight.
        """
        if state.lengths.device != self.model.device:
            return None
        cache, seqs, budgets = self.cache, view.seqs, view.budgets
        steps = self._steps(budgets)
        room = 1 + self.config.k + steps  # the round in flight may commit a token and a whole draft
        wanted = [i for i, budget in enumerate(budgets) if budget]
        new = [i for i in wanted if not cache.has_chain(seqs[i])]
        if not all(state.drafted and not state.drafted[i] for i in new) or not self._chains_alone(seqs[i] for i in new):
            return None
        rows = [i for i in wanted if i not in new and cache.reserve(seqs[i], room)]
        if new:
            read = self._read_on(seqs, [i for i in new if cache.make_room(seqs[i], 1 + steps) == 1 + steps])
            cache.catch_up([seqs[i] for i in read], most=1)
            rows = sorted([*rows, *read])
        drafts = [EMPTY] * len(seqs)
        if rows:
            starts = [ChainStart(seq.id, seq.seed, seq.params.temperature) for seq in (seqs[i] for i in rows)]
            chains = self.model.draft_chains(starts, steps, state.take(rows))
            for i, chain in zip(rows, chains or (), strict=True):
                cache.add_pending_chain(seqs[i], chain)
                drafts[i] = self._device_draft(chain, budgets[i])
        return drafts

    def _steps(self, budgets: Seq[int]) -> int:
        """The length of the chains to draft: the shortest captured one that covers every budget."""
        most = min(max(budgets, default=0), self.config.k)
        return next(length for length in self._chain_lengths if length >= most)

    def _chains_on_device(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft] | None:
        """Draft whole chains on the device, where model, requests and pages allow it; None: draft step by step.

        Only temperature and noise are applied. A token that top-k, top-p or the like would have ruled out is rejected
        by the target: about one in ten at top_p 0.9. To truncate at each step would cost a sort of its logits.

        All texts or none: if one must be drafted step by step, each step takes a pass anyway, which the others join at
        hardly any cost. Chains for the others would be further passes.
        """
        if not seqs or not self._chains_alone(seqs) or not all(len(seq.tokens) > 1 for seq in seqs):
            return None
        steps = self._steps(budgets)
        if not all(self.cache.reserve(seq, steps) for seq in seqs):
            return None
        self.cache.catch_up(seqs)
        starts = [
            ChainStart(s.id, s.seed, s.params.temperature, len(s.tokens), (s.tokens[-2], s.tokens[-1])) for s in seqs
        ]
        chains = self.model.draft_chains(starts, steps)
        if chains is None:
            return None
        for seq, chain in zip(seqs, chains, strict=True):
            self.cache.add_chain(seq, chain)
        return [self._device_draft(chain, budget) for chain, budget in zip(chains, budgets, strict=True)]

    def _chains_alone(self, seqs: Iterable[Sequence]) -> bool:
        """Whether the device can draft whole chains for these texts by itself."""
        able = self.model.asynchronous and self.model.vocab_size <= self.target_vocab
        simple = self.mode == "seeded" and not self.config.min_prob
        return able and simple and all(seq.unprocessed for seq in seqs)

    def _chains(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Draft for all sequences one token at a time: one batched pass for each step."""
        tokens: list[list[Token]] = [[] for _ in seqs]
        last_probs = [1.0] * len(seqs)
        stated: list[list[Tensor]] = [[] for _ in seqs]
        for step in range(max(budgets, default=0)):
            # Whether to continue is decided by the tokens so far, never by the one to come.
            active = [i for i, most in enumerate(budgets) if step < most and last_probs[i] >= self.config.min_prob]
            if not active:
                break
            paths = [tuple(tokens[i]) for i in active]
            logits = self.cache.advance([(seqs[i], path) for i, path in zip(active, paths, strict=True)])
            drawn, probs = draft_token(logits, [seqs[i] for i in active], paths, self.mode)
            own = token_probs(logits, drawn) if self.config.min_prob else [1.0] * len(drawn)
            for row, i in enumerate(active):
                tokens[i].append(drawn[row])
                last_probs[i] = own[row]
                if probs is not None and not seqs[i].params.greedy:  # greedy requests state no probs in any batch
                    stated[i].append(probs[row])
        return [self._draft(tuple(each), probs) for each, probs in zip(tokens, stated, strict=True)]

    def _tree(self, seq: Sequence, room: int) -> Draft:
        """Draft a tree of at most `room` nodes."""
        tree = self._beam_search.build(seq, room)
        probs = [node.probs for node in tree if node.probs is not None]  # all nodes have some, or none has
        return self._draft(tuple(node.token for node in tree), probs, tuple(node.parent for node in tree))

    def _device_draft(self, chain: Seq[Token], budget: int) -> Draft:
        """The draft of a chain made on the device, cut to its budget."""
        return replace(self._draft(chain, ()), known=True).first_nodes(budget)

    def _draft(self, tokens: Seq[Token], probs: Seq[Tensor], parents: Seq[int] | None = None) -> Draft:
        """probs: [vocab] for each token, or none at all; padded to the target's vocabulary where that is larger.

        `expected` is the recent mean of accepted tokens, at most the draft's length. It does not depend on the tokens'
        own probabilities: in mode `distribution` what was sampled may not decide whether it is used.
        """
        stated = None
        if probs:
            stated = torch.nn.functional.pad(torch.stack([*probs]), (0, self.target_vocab - len(probs[0])))
        return Draft(tokens, parents, stated, self.traits.name, min(self._accepted.value, len(tokens)))


def chain_lengths(k: int) -> tuple[int, ...]:
    """The lengths of the chains that are captured, rising, up to k: a draft is cut from the next longer one."""
    lengths, length, following = [], 1, 2
    while length < k:
        lengths.append(length)
        length, following = following, length + following
    return (*lengths, k)


def fair_shares(wants: Seq[int], total: int) -> list[int]:
    """Divide `total` so that none gets more than it wants, and none less than another that wants more than it gets."""
    shares = [0] * len(wants)
    for served, i in enumerate(sorted(range(len(wants)), key=lambda i: wants[i])):
        shares[i] = min(wants[i], total // (len(wants) - served))
        total -= shares[i]
    return shares
