"""Attention over cached keys and values in plain PyTorch: the reference, on any device.

`attend_rows` computes each query row as a separate problem: one query, one head, keys in text order, their number a
multiple of 16. On the CPU the bits of a row then do not depend on the other rows, nor on how far the keys are padded,
so that scoring a draft and decoding one token at a time agree to the last bit. `attend_block` computes the same with
keys that all rows share, which suits a GPU. `attend_pages` and `locate_rows` compute the same as the functions of these
names in triton_attention.py and triton_rope.py, from the same arguments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.batch import AttentionBatch, AttentionWorkspace, RowPlaces


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
    """As `attend_rows`, keys shared by all rows; where each row has its own keys, row by row."""
    if k.dim() == 4:
        return attend_rows(q, k, v, mask, scale, softcap)
    q = q.transpose(0, 1)[None]  # [1, H, R, D]
    k = k.transpose(0, 1)[None]
    v = v.transpose(0, 1)[None]
    mask = mask[None, None]
    if softcap:
        return _capped(q, k, v, mask, scale, softcap)[0].transpose(0, 1)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    work: AttentionWorkspace | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    skip: int = 0,
    page: int = 16,
    pdl: bool = False,
) -> None:
    """q [N, H, D] over cached keys and values [slots, KV, D] -> out [N, H, D]; softmax in float32.

    A row sees the cached positions before `starts` that are fewer than `window` positions back (0: all of them), and
    those rows of the pass whose bits are set in its ancestors; each of the first `skip` positions of a sequence is seen
    only by its own row. Keys and values that a row does not see do not affect it, even where they are NaN. Rows that
    are not real get arbitrary values. Only the Triton kernel uses `work`, `pdl` and the batch's splits.
    """
    (_, heads, dim), kv = q.shape, keys.shape[1]
    sequences, width, index = len(batch.starts), batch.width, batch.packing.row_index
    ends = batch.starts + batch.widths.clamp(min=1)
    positions = torch.arange(int(ends.max()), device=q.device)  # [T]
    slots = batch.block_tables[batch.table_ids][:, positions // page].long() * page + positions % page  # [B, T]
    slots = slots.where(positions < ends[:, None], slots[:, :1])  # beyond a sequence's end its table may name any page
    ahead = positions - batch.starts[:, None, None]  # [B, 1, T]
    bits, depths = batch.ancestors.view(sequences, width, 1), batch.depths.view(sequences, width, 1)
    seen = (ahead < 0) | (bits >> ahead.clamp(0, 63) & 1 == 1)  # [B, W, T]
    if window:
        seen &= (ahead >= 0) | (ahead > depths - window)
    seen &= positions < ends[:, None, None]
    seen &= (positions >= skip) | (ahead == depths)
    wide = torch.promote_types(q.dtype, torch.float32)
    placed = q.new_zeros(sequences * width + 1, heads, dim, dtype=wide)  # padding rows go to the last place
    placed[index] = q.to(wide)
    grouped = placed[:-1].view(sequences, width, kv, heads // kv, dim)
    scores = torch.einsum("bwkgd,btkd->bkgwt", grouped, keys[slots].to(wide)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    v = values[slots].to(wide)
    v = v.where(v == v, 0)  # 0 times NaN would be NaN; a row that sees the token has NaN from its key
    out.copy_(torch.einsum("bkgwt,btkd->bwkgd", weights, v).reshape(-1, heads, dim)[index])


def locate_rows(
    batch: AttentionBatch, cos_sin: Tensor, places: RowPlaces, *, scratch_slot: int, page: int = 16, pdl: bool = False
) -> None:
    """Fill in the places of a batch's rows: slots, and the cosines and sines of their positions.

    cos_sin [positions, D/2, 2] float32. scratch_slot: the slot of rows that are not real; their rotation is arbitrary.
    """
    rows, index = torch.arange(batch.width, device=cos_sin.device), batch.packing.row_index
    real = rows < batch.widths[:, None]  # [B, W]
    positions = torch.where(real, batch.starts[:, None] + rows, 0)
    pages = batch.block_tables[batch.table_ids[:, None], positions // page]
    slots = torch.where(real, pages.long() * page + positions % page, scratch_slot).flatten()[index]
    places.slots.copy_(torch.where(index < 0, scratch_slot, slots))
    places.cos_sin.copy_(cos_sin[(batch.starts[:, None] + batch.depths.view(-1, batch.width)).flatten()[index]])


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Scores soft-capped into (-softcap, softcap) before the mask, as in Gemma 2; SDPA has no such option."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    return (scores.softmax(-1) @ v.to(wide)).to(q.dtype)
