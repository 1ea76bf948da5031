"""The target drafts for itself with some of its layers left out: no weights and no cache of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits
from outrider.drafters.draft_model import chain_lengths
from outrider.drafters.head_drafter import native_target
from outrider.drafters.mean_accepted import MeanAccepted
from outrider.drafters.options import check_options
from outrider.runners.base import ChainStart
from outrider.runners.device_state import DeviceState
from outrider.runners.native import NativeRunner
from outrider.verify.base import Mode
from outrider.verify.draft_sampling import draft_token

MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipConfig:
    """Draft with the target itself, without some of its layers."""

    skip: str = ""
    """Layers left out, such as 8-11/14/20, counted from 0; empty: every other layer of the middle half."""
    k: int = 3
    """Tokens drafted a round."""

    def __post_init__(self) -> None:
        check_options("layer-skip", self, k=(1, 64))
        parse_layers(self.skip)

    @property
    def traits(self) -> Traits:
        return Traits(
            name="layer-skip",
            max_tokens=self.k,
            runs_model=True,
            drafts_ahead=True,
            pays_budget=True,
            states_probs=True,
        )

    def build(self, context: DrafterContext) -> LayerSkip:
        target = native_target("layer-skip", context)
        count = len(target.model.config.layers)
        kept = kept_layers(count, parse_layers(self.skip) if self.skip else default_skip(count))
        drafter = LayerSkip(target, kept, self, context.mode)
        drafter.capture(context.max_batch)
        return drafter


class LayerSkip(Drafter):
    """Proposes what the target would choose without some layers, by the same options, seed and noise.

    The layers that are kept read the target's own keys and values of the text. From the text's last token on they write
    theirs, which the target overwrites when it scores the draft. So there is nothing to keep between rounds.
    """

    def __init__(self, target: NativeRunner, kept: Seq[int], config: LayerSkipConfig, mode: Mode) -> None:
        self.model, self.config, self.traits = target.with_layers(kept), config, config.traits
        self.mode: Mode = mode
        self.step_model = self.model
        self._chain_lengths = chain_lengths(config.k)
        self.lengths = self._chain_lengths if self.model.asynchronous else ()
        self._accepted = MeanAccepted(1.0)

    def capture(self, batch: int) -> None:
        """Capture chains for rounds of up to `batch` sequences."""
        if self.mode == "seeded":
            for _ in self.model.capture_chains(batch, self._chain_lengths):
                pass

    def propose(self, view: RoundView) -> list[Draft] | None:
        if view.state is not None:
            return self._after(view, view.state)
        drafts = [EMPTY] * len(view.seqs)
        # a text that is being read again has no keys and values to continue from
        rows = [i for i, seq in enumerate(view.seqs) if view.budgets[i] > 0 and seq.cached == len(seq.tokens) - 1]
        seqs, budgets = [view.seqs[i] for i in rows], [min(view.budgets[i], self.config.k) for i in rows]
        made = self._chains_on_device(seqs, budgets) or self._chains(seqs, budgets)
        for i, draft in zip(rows, made, strict=True):
            drafts[i] = draft
        return drafts

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        self._accepted.note(drafts, verdicts)

    def _after(self, view: RoundView, state: DeviceState) -> list[Draft] | None:
        """Draft chains behind the round in flight, which may commit a token and a whole draft."""
        drafts, steps = [EMPTY] * len(view.seqs), self._steps(view.budgets)
        room = 1 + self.config.k + steps
        rows = [i for i, seq in enumerate(view.seqs) if view.budgets[i] and self._reserve(seq, room)]
        if rows:
            starts = [ChainStart(s.id, s.seed, s.params.temperature) for s in (view.seqs[i] for i in rows)]
            chains = self.model.draft_chains(starts, steps, state.take(rows))
            if chains is None:
                return None
            for i, chain in zip(rows, chains, strict=True):
                drafts[i] = self._draft(chain, (), known=True).first_nodes(view.budgets[i])
        return drafts

    def _chains_on_device(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft] | None:
        """Draft whole chains on the device, where runner and requests allow it; None: draft step by step."""
        if not seqs or self.mode != "seeded" or not self.model.asynchronous:
            return None
        steps = self._steps(budgets)
        if not all(seq.unprocessed and len(seq.tokens) > 1 and self._reserve(seq, steps) for seq in seqs):
            return None
        starts = [
            ChainStart(s.id, s.seed, s.params.temperature, len(s.tokens), (s.tokens[-2], s.tokens[-1])) for s in seqs
        ]
        chains = self.model.draft_chains(starts, steps)
        if chains is None:
            return None
        made = [self._draft(chain, (), known=True) for chain in chains]
        return [draft.first_nodes(budget) for draft, budget in zip(made, budgets, strict=True)]

    def _chains(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Draft for all sequences one token at a time: one batched pass for each step."""
        tokens: list[tuple[Token, ...]] = [()] * len(seqs)
        stated: list[list[Tensor]] = [[] for _ in seqs]
        for step in range(max(budgets, default=0)):
            active = [i for i, budget in enumerate(budgets) if step < budget]
            spans = [
                Span(seqs[i].id, len(seqs[i].tokens) - 1 + step, (tokens[i][-1] if step else seqs[i].tokens[-1],))
                for i in active
            ]
            logits = self.model.score(spans).logits
            drawn, probs = draft_token(logits, [seqs[i] for i in active], [tokens[i] for i in active], self.mode)
            for row, i in enumerate(active):
                tokens[i] = (*tokens[i], drawn[row])
                if probs is not None and not seqs[i].params.greedy:
                    stated[i].append(probs[row])
        return [self._draft(chain, probs) for chain, probs in zip(tokens, stated, strict=True)]

    def _reserve(self, seq: Sequence, more: int) -> bool:
        """Reserve pages for a text and `more` tokens: the device writes only where the sequence owns pages."""
        length = len(seq.tokens) + more
        return length <= self.model.context and self.model.pool.reserve(seq.id, length)

    def _steps(self, budgets: Seq[int]) -> int:
        """The length of the chains to draft: the shortest captured one that covers every budget."""
        most = min(max(budgets, default=0), self.config.k)
        return next(length for length in self._chain_lengths if length >= most)

    def _draft(self, tokens: Seq[Token], probs: Seq[Tensor], *, known: bool = False) -> Draft:
        """probs: [vocab] for each token, or none at all."""
        stated = torch.stack([*probs]) if probs else None
        return Draft(tokens, None, stated, self.traits.name, min(self._accepted.value, len(tokens)), known)


def parse_layers(written: str) -> tuple[int, ...]:
    """`8-11/14/20` -> 8, 9, 10, 11, 14, 20: rising, all different."""
    layers: list[int] = []
    for part in filter(None, written.split("/")):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(n.isascii() and n.isdigit() and len(n) <= 4 for n in numbers) or int(numbers[0]) > int(numbers[1]):
            raise ConfigError(f"layer-skip: {part.strip()!r} is no layer and no range of layers; write skip=8-11/14/20")
        layers += range(int(numbers[0]), int(numbers[1]) + 1)
    if len(layers) > MAX_LAYERS or layers != sorted(set(layers)):
        raise ConfigError(f"layer-skip: skip={written} must name layers in rising order, each once")
    return tuple(layers)


def write_layers(layers: Seq[int]) -> str:
    """The inverse of `parse_layers`."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return "/".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def default_skip(count: int) -> tuple[int, ...]:
    """Every other layer of the middle half: the first and the last layers matter most."""
    return tuple(range(count // 4 + 1, count - count // 4, 2))


def kept_layers(count: int, skip: Seq[int]) -> list[int]:
    """The layers that are not in `skip`; ConfigError where a layer does not exist, or none or all are left out."""
    if any(layer >= count for layer in skip):
        raise ConfigError(f"layer-skip: no layer {max(skip)}; this model's layers are 0 to {count - 1}")
    kept = [layer for layer in range(count) if layer not in skip]
    if not kept or len(kept) == count:
        raise ConfigError(
            f"layer-skip: skip={write_layers(skip)} leaves out {len(skip)} of {count} layers; leave out some, not all"
        )
    return kept
