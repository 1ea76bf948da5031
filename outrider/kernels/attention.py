"""Attention over cached keys and values: the reference, in plain PyTorch, on any device.

Two forms of the same sum. `attend_rows` gives each query row a problem of its own: one
query, one head, keys in text order, their number a multiple of 16. On the CPU the bits of a
row then do not depend on the rows beside it, nor on how far the keys are padded, so that
scoring a draft and decoding one token at a time agree to the last bit. `attend_block`
shares the keys between rows, which is how a GPU wants it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """q [R, H, D]; k and v [T, Hkv, D], or [R, T, Hkv, D] where each row has its own; mask [R, T] -> [R, H, D]."""
    rows = q.shape[0]
    if k.dim() == 3:
        k = k.transpose(0, 1).expand(rows, -1, -1, -1)  # [R, Hkv, T, D]
        v = v.transpose(0, 1).expand(rows, -1, -1, -1)
    else:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    mask = mask[:, None, None]  # [R, 1, 1, T]
    q = q.unsqueeze(2)  # [R, H, 1, D]
    if softcap:
        return _capped(q, k, v, mask, scale, softcap).squeeze(2)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).squeeze(2)


def attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """The same, keys shared by all rows; where each row has its own keys, row by row."""
    if k.dim() == 4:
        return attend_rows(q, k, v, mask, scale, softcap)
    q = q.transpose(0, 1)[None]  # [1, H, R, D]
    k = k.transpose(0, 1)[None]
    v = v.transpose(0, 1)[None]
    mask = mask[None, None]
    if softcap:
        return _capped(q, k, v, mask, scale, softcap)[0].transpose(0, 1)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Scores squashed into (-softcap, softcap) before the mask, as Gemma 2 does; SDPA has no such option."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    return (scores.softmax(-1) @ v.to(wide)).to(q.dtype)
