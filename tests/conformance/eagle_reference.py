"""The published recipes of EAGLE-1 and EAGLE-3 in float64, over the whole text: no cache, no code of the package.

Row t reads token t + 1 and a hidden state of position t: the target's where it has read it, else the head's own output
of the row before. Its logits are for token t + 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from block_reference import norm, rope, tapped_outputs
from torch import Tensor


class Reference:
    """A head by its checkpoint's tensors, over a Transformers model."""

    def __init__(self, weights: Mapping[str, Tensor], model: Any, options: Mapping[str, Any]) -> None:
        """options: taps, dim, and whether norm_before_residual, norm_output and such hold."""
        self.weights = {name: each.double() if each.is_floating_point() else each for name, each in weights.items()}
        self.model, self.options = model, options
        self.embedding = model.get_input_embeddings().weight.detach().double()
        self.final_norm = model.model.norm.weight.detach().double()
        self.theta = float(model.config.rope_parameters["rope_theta"])
        self.eagle3 = "layers.0.hidden_norm.weight" in weights

    @property
    def tokens(self) -> Tensor:
        """The token of each column of logits."""
        vocab = len(self.embedding)
        return torch.arange(vocab) if "d2t" not in self.weights else _ids(self.weights["d2t"])

    def logits(self, text: Seq[int], path: Seq[int]) -> Tensor:
        """float64 [draft ids]: of what follows the text and then the path, drafted by the head itself."""
        features = tapped_outputs(self.model, text[:-1], self.options["taps"])
        hidden = self.fuse(features)  # [T - 1, hidden]
        ids = list(text[1:])
        for token in [*path, None]:
            out = self.rows(ids, hidden)
            if token is None:
                break
            ids.append(token)
            hidden = torch.cat([hidden, out[-1:]])
        last = out[-1]
        if self.eagle3 and not self.options.get("norm_output"):
            last = norm(last, self.weights["norm.weight"])
        head = self.weights.get("lm_head.weight")
        if head is None:
            head = self.model.lm_head.weight.detach().double()[self.tokens]
        return head @ last

    def fuse(self, features: Tensor) -> Tensor:
        w = self.weights
        if not self.eagle3:
            return norm(features, self.final_norm)
        if "input_norm.weight" in w:
            features = norm(features, w["input_norm.weight"])
        if "fc_norm.0.weight" in w:
            parts = features.chunk(len(self.options["taps"]), -1)
            features = torch.cat([norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return features @ w["fc.weight"].T

    def rows(self, ids: Seq[int], hidden: Tensor) -> Tensor:
        """All rows through the first layer, each seeing those before it: [T, hidden]"""
        w, embedded = self.weights, self.embedding[list(ids)]
        if self.eagle3:
            normed = norm(hidden, w["layers.0.hidden_norm.weight"])
            read = torch.cat([norm(embedded, w["layers.0.input_layernorm.weight"]), normed], -1)
            x = normed if self.options.get("norm_before_residual") else hidden
        else:
            x = torch.cat([embedded, hidden], -1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
            read = x
        x = x + self.attention(read) @ w["layers.0.self_attn.o_proj.weight"].T
        y = norm(x, w["layers.0.post_attention_layernorm.weight"])
        gate, up = (y @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w["layers.0.mlp.down_proj.weight"].T
        return norm(x, w["norm.weight"]) if self.options.get("norm_output") else x

    def attention(self, read: Tensor) -> Tensor:
        dim, count = self.options["dim"], len(read)
        q, k, v = (
            (read @ self.weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(count, -1, dim) for name in "qkv"
        )
        positions = torch.arange(count)
        q, k = rope(q, positions, self.theta), rope(k, positions, self.theta)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, -1)


def _ids(d2t: Tensor) -> Tensor:
    return torch.arange(len(d2t)) + d2t
