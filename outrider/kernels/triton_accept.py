"""Where texts stand after a round, on the device: `accept_chains` of kernels/settle.py as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import MAX_SEQUENCES, MAX_WIDTH


# one variant for all sizes, which is there before the first round
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["ids", "starts", "widths", "choices"])
def _accept_chain(ids, starts, widths, choices, lengths, last, width, SEQUENCES: tl.constexpr, WIDTH: tl.constexpr):
    """One text: follow the target's choices down its guesses."""
    b = tl.program_id(0)
    before = tl.arange(0, SEQUENCES)
    first = tl.sum(tl.load(widths + before, mask=before < b, other=0), 0)
    own = tl.load(widths + b)
    w = tl.arange(0, WIDTH)
    chosen = tl.load(choices + first + w, mask=w < own, other=-1)
    drafted = tl.load(ids + b * width + w + 1, mask=w + 1 < own, other=-2)
    accepted = tl.min(tl.where((drafted != chosen) | (chosen < 0), w, WIDTH), 0)  # after the last guess stands none
    token = tl.sum(tl.where(w == accepted, chosen, 0), 0)
    step_back = (token < 0) & (accepted > 0)  # nothing follows the last guess that stands: it is read again
    token = tl.where(step_back, tl.load(ids + b * width + accepted), token)
    accepted = tl.where(step_back, accepted - 1, accepted)
    tl.store(lengths + b, tl.load(starts + b) + 2 + accepted)
    tl.store(last + 2 * b, tl.maximum(tl.load(ids + b * width + accepted), 0))
    tl.store(last + 2 * b + 1, tl.maximum(token, 0))


def accept_chains(ids: Tensor, starts: Tensor, widths: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """As the plain `accept_chains`; at most MAX_TEXTS texts of MAX_WIDTH ids, and ids contiguous."""
    count, width = ids.shape
    if count > MAX_SEQUENCES or width > MAX_WIDTH:
        raise ValueError(f"at most {MAX_SEQUENCES} sequences of {MAX_WIDTH} ids, got {count} of {width}")
    lengths = torch.empty(count, dtype=torch.int64, device=ids.device)
    last = torch.empty(count, 2, dtype=torch.int64, device=ids.device)
    _accept_chain[(count,)](ids, starts, widths, choices, lengths, last, width, MAX_SEQUENCES, MAX_WIDTH, num_warps=1)
    return lengths, last
