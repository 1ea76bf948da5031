"""Where texts stand after a round, on the device: `settle` of kernels/settle.py as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TEXTS = 256
MAX_WIDTH = 32


# one variant for all sizes, which is there before the first round
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["ids", "starts", "widths", "choices"])
def _settle(ids, starts, widths, choices, lengths, last, width, TEXTS: tl.constexpr, WIDTH: tl.constexpr):
    """One text: follow the target's choices down its guesses."""
    b = tl.program_id(0)
    before = tl.arange(0, TEXTS)
    first = tl.sum(tl.load(widths + before, mask=before < b, other=0), 0)
    own = tl.load(widths + b)
    w = tl.arange(0, WIDTH)
    chosen = tl.load(choices + first + w, mask=w < own, other=-1)
    guess = tl.load(ids + b * width + w + 1, mask=w + 1 < own, other=-2)
    stood = tl.min(tl.where((guess != chosen) | (chosen < 0), w, WIDTH), 0)  # after the last guess stands none
    token = tl.sum(tl.where(w == stood, chosen, 0), 0)
    back = (token < 0) & (stood > 0)  # nothing follows the last guess that stands: it is read again
    token = tl.where(back, tl.load(ids + b * width + stood), token)
    stood = tl.where(back, stood - 1, stood)
    tl.store(lengths + b, tl.load(starts + b) + 2 + stood)
    tl.store(last + 2 * b, tl.maximum(tl.load(ids + b * width + stood), 0))
    tl.store(last + 2 * b + 1, tl.maximum(token, 0))


def settle(ids: Tensor, starts: Tensor, widths: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """As the plain `settle`; at most MAX_TEXTS texts of MAX_WIDTH ids, and ids contiguous."""
    count, width = ids.shape
    if count > MAX_TEXTS or width > MAX_WIDTH:
        raise ValueError(f"at most {MAX_TEXTS} texts of {MAX_WIDTH} ids, got {count} of {width}")
    lengths = torch.empty(count, dtype=torch.int64, device=ids.device)
    last = torch.empty(count, 2, dtype=torch.int64, device=ids.device)
    _settle[(count,)](ids, starts, widths, choices, lengths, last, width, MAX_TEXTS, MAX_WIDTH, num_warps=1)
    return lengths, last
