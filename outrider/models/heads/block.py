"""A block drafter: several tokens in one pass of a few layers over the target's tapped outputs (DFlash, DSpark).

A block is the text's last token, the anchor, which the target has not read yet, and a row for each token to come. Its
rows attend to the target's outputs at all positions before the anchor, and to each other. Only the Markov head knows
which token a row follows: it is a bias on each token's logits that depends on the token before it.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.decoder import Attend, Decoder
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.layers import HeadLayer, RMSNorm, Rotary
from outrider.models.linear import Int8Linear, Linear, LinearOp

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, [N, kv_heads, dim] both."""


class MarkovHead(nn.Module):
    """logits of a token += w2 w1[the token before it]"""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.outputs, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        """int64 [...] -> [..., outputs]"""
        return self.markov_w2(self.markov_w1(before))


class ConfidenceHead(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class BlockHead(nn.Module):
    """Its parameters are named as in checkpoints. Embedding and output head are the target's, unless it has its own.

    The target's outputs at a position give keys and values of that position (`context`, `keys_values`), which depend on
    no draft and are never rolled back. `forward` runs blocks; the `Attend` it is given adds the context.
    """

    def __init__(self, config: HeadConfig, decoder: Decoder) -> None:
        super().__init__()
        self.config, self.decoder = config, decoder
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, hidden, bias=config.bias)
        self.hidden_norm = RMSNorm(hidden, config.norm_eps)
        self.layers = nn.ModuleList(HeadLayer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(hidden, config.norm_eps)
        self.rotary = Rotary(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if config.own_embedding else None
        self.lm_head = nn.Linear(hidden, config.outputs, bias=False) if config.own_head else None
        self.mask_embedding = nn.Parameter(torch.zeros(hidden)) if config.own_mask else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        extra = config.markov_rank if config.confidence_with_markov else 0
        self.confidence_head = ConfidenceHead(hidden + extra) if config.confidence else None
        reduced = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.draft_vocab_size else None
        self.register_buffer("d2t", reduced)
        self._rows: LinearOp | None = None

    @property
    def drafts(self) -> int:
        """Tokens that one block drafts."""
        return self.config.block_size - (not self.config.sample_from_anchor)

    @property
    def scale(self) -> float:
        """Multiplies query times key."""
        return self.config.head_dim**-0.5

    @property
    def tokens(self) -> Tensor | None:
        """int64 [outputs]: the token of each column of its logits; None: the columns are the tokens."""
        d2t = cast("Tensor | None", self.d2t)
        return None if d2t is None else torch.arange(len(d2t), device=d2t.device) + d2t

    def output_head(self) -> LinearOp:
        """[N, hidden] -> [N, outputs]: its own, the target's, or the rows of the target's that it can draft.

        Those rows are copied on first use, before which `d2t` must be set.
        """
        if self.lm_head is not None:
            return self.lm_head
        if self._rows is None:
            whole, tokens = self.decoder.weights.head, self.tokens
            self._rows = whole if tokens is None else cast("Linear | Int8Linear", whole).take(tokens)
        return self._rows

    def context(self, features: Tensor) -> Tensor:
        """The target's tapped outputs [N, taps * target hidden] -> [N, hidden]"""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """Every layer's keys and values at positions before an anchor: [N, hidden], int64 [N] -> one pair per layer."""
        rotation = self.rotary(positions)
        return [layer.self_attn.keys_values(context, rotation) for layer in self._layers()]

    def embed(self, anchors: Tensor) -> Tensor:
        """The input rows of blocks: int64 [B] -> [B, block, hidden]"""
        ids, dtype = anchors[:, None], self.norm.weight.dtype
        if self.mask_embedding is None:
            masks = torch.full((1, self.config.block_size - 1), self.config.mask_token_id, device=anchors.device)
            return self._embedded(torch.cat([ids, masks.expand(len(ids), -1)], 1)).to(dtype)
        masks = self.mask_embedding.expand(len(ids), self.config.block_size - 1, -1)
        return torch.cat([self._embedded(ids).to(dtype), masks], 1)

    def forward(self, anchors: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """B blocks: anchors int64 [B] and their positions int64 [B] -> [B, drafts, hidden], after the final norm.

        attend(layer, q, k, v) gets the rows of all blocks, [B * block, ...]: each sees the context before its anchor,
        and its own block as far as `config.causal` says.
        """
        x = self.embed(anchors)
        block = self.config.block_size
        rotation = self.rotary((positions[:, None] + torch.arange(block, device=positions.device)).flatten())
        rows = x.flatten(0, 1)
        for layer in self._layers():
            rows = layer(rows, rotation, attend)
        return self.norm(rows).view(x.shape)[:, block - self.drafts :]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, outputs], without the Markov head's part"""
        return self.decoder.logits(hidden, self.output_head())

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of the tokens' acceptance, before the sigmoid: [..., hidden], int64 [...] -> float32 [...]

        before: the token before each.
        """
        if self.confidence_head is None:
            raise ValueError("this head has no confidence head")
        if self.config.confidence_with_markov and self.markov_head is not None:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(before).to(hidden.dtype)], -1)
        return self.confidence_head.proj(hidden).float()[..., 0]

    def _layers(self) -> list[HeadLayer]:
        return cast("list[HeadLayer]", list(self.layers))

    def _embedded(self, ids: Tensor) -> Tensor:
        own = self.embed_tokens
        if own is not None:
            return F.embedding(ids, own.weight)
        return self.decoder.weights.embed(ids.flatten()).view(*ids.shape, -1)
