"""A toy EAGLE-like head with random weights: one layer over three tapped layers of the target; chains and trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import ConfigError
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits
from outrider.models.decoder import Attend, Decoder
from outrider.models.heads.config import HeadConfig
from outrider.runners.draft_batch import HeadDraft
from outrider.runners.heads import HeadBatch, HeadRunner
from outrider.runners.native import NativeRunner
from outrider.verify.noise import DRAFT, ROUND, TARGET, gumbel_at, keys_at


class ToyHead(nn.Module):
    """Embedding and output head are the target's own; the rest is random."""

    kv_heads, head_dim, skip = 2, 16, 0

    def __init__(self, decoder: Decoder, taps: int, seed: int) -> None:
        super().__init__()
        config, torch_seed = decoder.config, torch.Generator().manual_seed(seed)
        self.decoder, self.heads, hidden = decoder, 2 * self.kv_heads, config.hidden_size
        sizes = {"vocab_size": config.vocab_size, "hidden_size": hidden, "target_hidden_size": hidden}
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        self.config = HeadConfig(kind="eagle", **sizes, **shape)
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim

        def weight(out: int, inside: int) -> nn.Parameter:
            made = torch.randn(out, inside, generator=torch_seed) / inside**0.5
            return nn.Parameter(made.to(decoder.device, decoder.dtype), requires_grad=False)

        self.fc, self.mix, self.qkv = weight(hidden, taps * hidden), weight(hidden, 2 * hidden), weight(rows, hidden)
        self.out, self.up, self.down = (
            weight(hidden, self.heads * self.head_dim),
            weight(64, hidden),
            weight(hidden, 64),
        )
        self.frequencies = (10_000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)).to(decoder.device)

    def fuse(self, features: Tensor) -> Tensor:
        return F.linear(_norm(features), self.fc)

    def step(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        embedded = F.embedding(ids, self.decoder.weights.embedding).to(hidden.dtype)
        x = F.linear(torch.cat([_norm(embedded), _norm(hidden)], -1), self.mix)
        split = self.heads, self.kv_heads, self.kv_heads
        q, k, v = F.linear(_norm(x), self.qkv).view(len(x), -1, self.head_dim).split(split, 1)
        x = x + F.linear(attend(0, self._rope(q, positions), self._rope(k, positions), v), self.out)
        return x + F.linear(F.silu(F.linear(_norm(x), self.up)), self.down)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(self.decoder.weights.norm(hidden))

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions[:, None].float() * self.frequencies)[:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyEagleConfig:
    """Draft with a random head over the target's hidden states."""

    taps: tuple[int, ...] = (0, 1, 2)
    levels: int = 3
    branches: int = 1
    """First tokens, each followed by a chain; more than 1 drafts trees."""
    seed: int = 1

    @property
    def traits(self) -> Traits:
        most, ahead = self.levels * self.branches, {"drafts_ahead": True, "runs_model": True}
        return Traits(name="toy-eagle", max_tokens=most, kept_taps=self.taps, states_probs=True, **ahead)

    def build(self, context: DrafterContext) -> Drafter:
        if not isinstance(context.target, NativeRunner):
            raise ConfigError("toy-eagle reads the layers of a native target")
        return ToyEagle(self, context.target, context.mode == "distribution", context.max_batch)


class ToyEagle(Drafter):
    def __init__(self, config: ToyEagleConfig, target: NativeRunner, sampled: bool, max_batch: int) -> None:
        self.config, self.traits, self.sampled = config, config.traits, sampled
        target.keep_taps(config.taps)
        self.head = ToyHead(target.model.decoder, len(config.taps), config.seed)
        pool = None if target.graphs is None else target.graphs.graph_pool
        options = {"max_accepted": config.levels, "sampled": sampled, "graph_pool": pool}
        rows = 1 + (config.levels - 1) * config.branches
        self.runner = HeadRunner(target.model, self.head, self._draft, rows=rows, row_width=rows, **options)
        self.captured = list(self.runner.capture(max_batch))

    def propose(self, view: RoundView) -> Seq[Draft]:
        drafts, rows = [EMPTY] * len(view.seqs), self.runner.ready(view.seqs, view.state)
        if rows:
            asked = view.take(rows)
            made = self.runner.draft(asked.seqs, asked.state)
            tokens, nodes = HostCopy(made.tokens), made.tokens.shape[1]
            parents = None if made.parents is None else HostCopy(made.parents)
            for at, (i, seq) in enumerate(zip(rows, asked.seqs, strict=True)):
                tree = None if parents is None else DeviceRow(parents, at, nodes)
                probs = None if made.probs is None or seq.params.greedy else made.probs[at]
                draft = Draft(DeviceRow(tokens, at, nodes), tree, probs, self.traits.name, known=True)
                drafts[i] = draft.first_nodes(view.budgets[i])
        return drafts

    def forget(self, seq: Sequence) -> None:
        self.runner.forget(seq)

    def _draft(self, batch: HeadBatch, _: int) -> HeadDraft:
        """`branches` first tokens and a chain behind each: node n of a level follows node n of the one before."""
        branches, ids, inputs = self.config.branches, batch.last[:, None], batch.outputs()[:, None]
        batch.read()
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        parents = torch.empty(len(ids), 0, dtype=torch.int64, device=ids.device)
        for level in range(self.config.levels):
            out = batch.forward(ids, inputs, batch.lengths - 1, parents=parents if branches > 1 else None)
            ends = out[:, -branches:] if level else out[:, :1]
            new, drawn_from = self._sample(batch, ends, level, branches // ends.shape[1])
            tokens.append(new)
            probs.append(drawn_from.repeat_interleave(branches // ends.shape[1], 1))
            above = torch.arange(branches, device=ids.device) + (level - 1) * branches if level else ids[0] * 0 - 1
            parents = torch.cat([parents, above.expand(len(ids), branches)], 1)
            ids = torch.cat([ids, new], 1)
            inputs = torch.cat([inputs, ends.expand(-1, branches, -1)], 1)
        stated = torch.cat(probs, 1) if self.sampled else None
        return HeadDraft(torch.cat(tokens, 1), parents if branches > 1 else None, stated)

    def _sample(self, batch: HeadBatch, hidden: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        """The best `count` of log q + noise behind hidden [B, R, hidden], and q: [B, R * count], [B, R, vocab]."""
        size, rows, _ = hidden.shape
        warm = (batch.temperatures > 0)[:, None, None]
        logits = self.head.logits(hidden.flatten(0, 1)).double().view(size, rows, -1)
        q = (logits / torch.where(warm, batch.temperatures[:, None, None], 1.0)).log_softmax(-1)
        key, stream = (keys_at(batch.seeds, batch.lengths, ROUND), DRAFT) if self.sampled else (batch.seeds, TARGET)
        noise = gumbel_at(key, batch.lengths + level, q.shape[-1], stream=stream)[:, None]
        return (q + noise * warm).topk(count, -1).indices.flatten(1), q.exp()
