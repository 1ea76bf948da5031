"""The published recipe of a block drafter in float64, over the whole text: no cache, no code of the package.

H = RMS(fc(tapped outputs)) at every position before the anchor; block rows [anchor, mask, ...]; each layer attends with
keys and values of H and of the block; logits by the target's head; a bias by the token before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

EPS = 1e-6


def tapped_outputs(model: Any, tokens: Seq[int], taps: Seq[int]) -> Tensor:
    """A Transformers model's outputs of these layers, side by side: float64 [tokens, taps * hidden]"""
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, given: Any, out: Any) -> None:
            outputs[layer] = (out[0] if isinstance(out, tuple) else out).reshape(len(tokens), -1)

        return hook

    hooks = [model.model.layers[layer].register_forward_hook(keep(layer)) for layer in taps]
    with torch.inference_mode():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([outputs[layer] for layer in taps], -1).double()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [N, heads, dim]: dimension i is rotated with i + dim / 2."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None] / theta ** (torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def block_rows(
    weights: Mapping[str, Tensor],
    context: Tensor,
    rows: Tensor,
    *,
    layers: int,
    dim: int,
    theta: float,
    causal: bool,
    window: int,
) -> Tensor:
    """Input rows [block, hidden] behind a context [tokens, taps * hidden] -> final hidden states [block, hidden]"""
    w = {name: tensor.double() for name, tensor in weights.items()}
    h = norm(context @ w["fc.weight"].T, w["hidden_norm.weight"])
    start, block = len(h), len(rows)
    places, own = torch.arange(start + block), torch.arange(start, start + block)
    for i in range(layers):
        part = {key.removeprefix(f"layers.{i}."): t for key, t in w.items() if key.startswith(f"layers.{i}.")}
        x = norm(rows, part["input_layernorm.weight"])
        both = torch.cat([h, x])
        q = (x @ part["self_attn.q_proj.weight"].T).view(block, -1, dim)
        k = (both @ part["self_attn.k_proj.weight"].T).view(start + block, -1, dim)
        v = (both @ part["self_attn.v_proj.weight"].T).view(start + block, -1, dim)
        if "self_attn.q_norm.weight" in part:
            q, k = norm(q, part["self_attn.q_norm.weight"]), norm(k, part["self_attn.k_norm.weight"])
        q, k = rope(q, own, theta), rope(k, places, theta)
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            group = head * k.shape[1] // q.shape[1]
            scores = q[:, head] @ k[:, group].T / math.sqrt(dim)
            unseen = (places[None] > own[:, None]) & (places[None] >= start) if causal else scores != scores
            if window:
                unseen = unseen | ((places[None] < start) & (places[None] <= own[:, None] - window))
            out[:, head] = scores.masked_fill(unseen, -math.inf).softmax(-1) @ v[:, group]
        rows = rows + out.flatten(1) @ part["self_attn.o_proj.weight"].T
        x = norm(rows, part["post_attention_layernorm.weight"])
        gate, up = x @ part["mlp.gate_proj.weight"].T, x @ part["mlp.up_proj.weight"].T
        rows = rows + (gate * gate.sigmoid() * up) @ part["mlp.down_proj.weight"].T
    return norm(rows, w["norm.weight"])
