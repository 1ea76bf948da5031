"""How the logits of a block become draft tokens: a chain, or a tree of its likeliest nodes.

A token's logits are those of its row plus a bias that depends on the token before it (the Markov head). Rows are
computed once; only the bias is computed again for every node. Mode `seeded` adds the target's noise at a token's
position, as the target will; mode `distribution` draws chains from the block's own probabilities, and states them.

Plain PyTorch here, on any device; on CUDA mode `seeded` drafts by kernels/triton_chain.py and triton_block.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.share import share_tokens
from outrider.verify.largest import largest
from outrider.verify.noise import DRAFT, ROUND, TARGET, gumbel_at, keys_at

TREE_WIDTH = 8
"""Max nodes of one level that get children, and max children of each."""
_MIN_LOG_PROB = -100.0
_STEP = 1e-3
"""A node's score is at least so far below its parent's, so that rounding never ranks a node before its parent."""


class BlockLogits(NamedTuple):
    """The logits of B blocks of K rows over V columns, and what their tokens depend on."""

    rows: Tensor  # float32 [B, K, V]: row k is for the token at position lengths + k
    last: Tensor  # int64 [B]: the token before the first drafted one
    lengths: Tensor  # int64 [B]: tokens of each text
    seeds: Tensor  # int64 [B]
    temperatures: Tensor  # float64 [B]
    vocab: int
    """The size of the target's vocabulary."""
    tokens: Tensor | None = None  # int64 [V]: the token of each column; None: columns are tokens
    markov: tuple[Tensor, Tensor] | None = None
    """w1 [vocab, rank] and w2 [V, rank]: w2 w1[t] is added to the logits of what follows token t."""

    def kernel_arguments(self) -> tuple[Any, ...]:
        return self.rows, self.last, self.lengths, self.seeds, self.temperatures, self.tokens, self.markov

    def bias(self, before: Tensor) -> Tensor | float:
        """int64 [...] -> float32 [..., V]: what is added to the logits of what follows these tokens."""
        return 0.0 if self.markov is None else F.linear(F.embedding(before, self.markov[0]), self.markov[1]).float()

    def token_of(self, columns: Tensor) -> Tensor:
        return columns if self.tokens is None else self.tokens[columns]

    def scales(self) -> Tensor:
        """float64 [B]: the factor of the logits, 1 / temperature; 1 where temperature is 0."""
        return torch.where(self.temperatures > 0, 1 / self.temperatures, 1.0)

    def noisy(self) -> Tensor:
        """Rows times scale plus the target's noise, without bias: [B, K, V], float32 where no text samples."""
        warm = self.temperatures > 0
        if not self.rows.is_cuda and not bool(warm.any()):
            return self.rows
        count, size = self.rows.shape[1:]
        positions = (self.lengths[:, None] + torch.arange(count, device=self.last.device)).flatten()
        noise = gumbel_at(self.seeds.repeat_interleave(count), positions, size, stream=TARGET, tokens=self.tokens)
        scaled = self.rows * self.scales()[:, None, None]
        return torch.addcmul(scaled, noise.view(scaled.shape), warm[:, None, None].double())


class ConfidenceLayer(NamedTuple):
    """Predicts the probability that each token of a chain is accepted, given that those before it are."""

    hidden: Tensor  # [B, K, H]: of the blocks' rows
    weight: Tensor  # [H], or [H + rank]: it reads w1 of the token before, too
    bias: Tensor  # [1]

    def chances(self, block: BlockLogits, chain: Tensor) -> Tensor:
        """Chains int64 [B, K] -> these probabilities, float32 [B, K]"""
        read = self.hidden
        if block.markov is not None and len(self.weight) > read.shape[-1]:
            before = torch.cat([block.last[:, None], chain[:, :-1]], 1)
            read = torch.cat([read, F.embedding(before, block.markov[0]).to(read.dtype)], -1)
        return F.linear(read, self.weight[None], self.bias).float()[..., 0].sigmoid()


Chain = tuple[Tensor, Tensor | None]
"""Tokens int64 [B, K], and the probability that each is accepted, float32 [B, K]; None: nothing predicts it."""


def draft_chain(block: BlockLogits, layer: ConfidenceLayer | None = None, out: Chain | None = None) -> Chain:
    """Mode `seeded`: the best token of each row, one after another. out: tensors to write to; None: to new ones."""
    if block.rows.is_cuda:
        from outrider.kernels.triton_chain import draft_chains

        return draft_chains(*block.kernel_arguments(), confidence=layer, out=out)
    noisy, scales, before = block.noisy(), block.scales()[:, None], block.last
    chain: list[Tensor] = []
    for step in range(block.rows.shape[1]):
        before = block.token_of(largest(noisy[:, step] + block.bias(before) * scales)[1])
        chain.append(before)
    tokens = torch.stack(chain, 1)
    return _written((tokens, None if layer is None else layer.chances(block, tokens)), out)


def share_chains(tokens: Tensor, chances: Tensor, room: Tensor, total: Tensor) -> None:
    """Leave only the `total` tokens likeliest to be accepted, in place: see `share_tokens`. total: int64 [1].

    Only for mode `seeded`, where no draft changes a text.
    """
    if tokens.is_cuda:
        from outrider.kernels import triton_share

        triton_share.share_tokens(tokens, chances, room, total)
    else:
        tokens.copy_(share_tokens(tokens, chances, room, int(total)))


def _written(made: Chain, out: Chain | None) -> Chain:
    for new, place in zip(made, out or made, strict=True):
        if new is not None and place is not None:
            place.copy_(new)
    return out or made


def draw_chain(block: BlockLogits) -> tuple[Tensor, Tensor]:
    """Mode `distribution`: a chain drawn from q, and q itself: int64 [B, K], float64 [B, K, vocab].

    A text of temperature 0 takes the best tokens.
    """
    warm, scales, before = (block.temperatures > 0)[:, None], block.scales()[:, None], block.last
    batch, count, size = block.rows.shape
    keys = keys_at(block.seeds, block.lengths, ROUND)
    probs = block.rows.new_zeros(batch, count, block.vocab, dtype=torch.float64)
    chain: list[Tensor] = []
    for step in range(count):
        log_q = ((block.rows[:, step] + block.bias(before)) * scales).log_softmax(-1)  # float64 [B, V]
        noise = gumbel_at(keys, block.lengths + step, size, stream=DRAFT, tokens=block.tokens)
        before = block.token_of(largest(log_q + noise * warm)[1])
        chain.append(before)
        columns = torch.arange(size, device=before.device) if block.tokens is None else block.tokens
        probs[:, step].index_copy_(1, columns, log_q.exp())
    return torch.stack(chain, 1), probs


def draft_tree(block: BlockLogits, nodes: int) -> tuple[Tensor, Tensor]:
    """Mode `seeded`: the `nodes` likeliest nodes, the likeliest first, and their parents: int64 [B, nodes] twice.

    A node's score is the sum over its path of log softmax(logits / T + noise), which is log q where nothing is sampled:
    given the noise, it estimates how likely a target with similar logits takes the same path. The first n nodes are the
    tree of the n best. At most TREE_WIDTH nodes of each level get children, at most as many each.
    """
    if block.rows.is_cuda:
        from outrider.kernels.triton_block import draft_trees

        return draft_trees(*block.kernel_arguments(), nodes=nodes, width=TREE_WIDTH)
    noisy, scales = block.noisy(), block.scales()[:, None, None]
    batch, levels, size = noisy.shape
    before, totals = block.last[:, None], noisy.new_zeros(batch, 1, dtype=torch.float64)  # [B, F]
    slots = torch.full_like(before, -1)  # the frontier's places in the lists below
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # each level's tokens, parents' places and scores [B, F]
    count = 0
    for level in range(levels):
        rows = noisy[:, level, None].expand(-1, before.shape[1], -1)  # [B, F, V]
        scores = rows + block.bias(before) * scales
        best, columns = scores.double().log_softmax(-1).topk(min(TREE_WIDTH, size), -1)
        sums = totals[..., None] + best.nan_to_num(_MIN_LOG_PROB).clamp(min=_MIN_LOG_PROB) - _STEP
        totals, chosen = sums.flatten(1).topk(min(TREE_WIDTH, sums[0].numel(), nodes), -1)
        before = block.token_of(columns.flatten(1).gather(1, chosen))
        found.append((before, slots.gather(1, chosen // columns.shape[-1]), totals))
        slots = count + torch.arange(before.shape[1], device=before.device).expand(batch, -1)
        count += before.shape[1]
    tokens, parents, totals = (torch.cat(part, 1) for part in zip(*found, strict=True))
    kept = totals.topk(min(nodes, count), -1).indices  # [B, nodes]
    places = torch.full_like(tokens, -1).scatter_(1, kept, torch.arange(kept.shape[1]).expand(batch, -1))
    above = parents.gather(1, kept)
    return tokens.gather(1, kept), torch.where(above < 0, -1, places.gather(1, above.clamp(min=0)))
