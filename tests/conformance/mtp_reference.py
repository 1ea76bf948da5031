"""The published recipes of MTP modules in float64, over the whole text: no cache, no code of the package.

Row t reads token t + 1 and a hidden state of position t: the target's where it has read it, else the module's own
output of the row before, behind its final norm. Its logits are for token t + 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from block_reference import norm, rope, tapped_outputs
from tiny_mtp import names_of
from torch import Tensor


class MtpReference:
    """A module by its checkpoint's tensors, over a Transformers model."""

    def __init__(self, layout: str, tensors: Mapping[str, Tensor], model: Any, dim: int) -> None:
        self.layout, self.dim, self.model = layout, dim, model
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        self.layers = len(model.model.layers)
        self.names = names_of(layout, self.layers)
        self.embedding = model.get_input_embeddings().weight.detach().double()
        self.head = model.lm_head.weight.detach().double()
        self.theta = float(model.config.rope_parameters["rope_theta"])

    def logits(self, text: Seq[int], path: Seq[int]) -> Tensor:
        """float64 [vocab]: of what follows the text and then the path, drafted by the module itself."""
        hidden = tapped_outputs(self.model, text[:-1], [self.layers - 1])
        if self.layout != "mimo":
            hidden = norm(hidden, self.model.model.norm.weight.detach().double())
        ids = list(text[1:])
        for token in path:
            hidden = torch.cat([hidden, self.rows(ids, hidden)[-1:]])
            ids.append(token)
        return self.head @ self.rows(ids, hidden)[-1]

    def rows(self, ids: Seq[int], hidden: Tensor) -> Tensor:
        """All rows, each seeing those before it: [T, hidden]"""
        layer = self.names["layer"]
        embedded = self.normed(self.embedding[list(ids)], self.names["embedding"])
        hidden = self.normed(hidden, self.names["hidden"])
        both = [hidden, embedded] if self.layout == "mimo" else [embedded, hidden]
        x = self.linear(torch.cat(both, -1), self.names["fc"])
        x = x + self.linear(self.attention(self.normed(x, f"{layer}input_layernorm")), f"{layer}self_attn.o_proj")
        y = self.normed(x, f"{layer}post_attention_layernorm")
        gate, up = (self.linear(y, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
        x = x + self.linear(gate * gate.sigmoid() * up, f"{layer}mlp.down_proj")
        return self.normed(x, self.names["final"])

    def attention(self, read: Tensor) -> Tensor:
        count, prefix = len(read), f"{self.names['layer']}self_attn."
        q, k, v = (self.linear(read, f"{prefix}{name}_proj").view(count, -1, self.dim) for name in "qkv")
        if f"{prefix}q_norm.weight" in self.weights:
            q, k = self.normed(q, f"{prefix}q_norm"), self.normed(k, f"{prefix}k_norm")
        positions = torch.arange(count)
        q, k = rope(q, positions, self.theta), rope(k, positions, self.theta)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(self.dim)
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, -1)

    def normed(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.weights[f"{name}.weight"] + (self.layout == "qwen"))

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)
