"""How likely the target finds tokens: log-probability, rank, and the most likely tokens beside each."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import Token


def token_logprobs(logits: Tensor, tokens: Seq[Token], top: int) -> list[TokenLogprob]:
    """The log-probability and rank of tokens[r] in raw logits [R, vocab], and the `top` best tokens there.

    Rank 1 is the best; equals share the better rank. The best tokens come best first, lower ids
    first among equals.
    """
    block = launch_logprobs(logits, torch.tensor(tokens, dtype=torch.int64, device=logits.device), top)
    return read_logprobs(block.tolist(), tokens, top)


def launch_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """The input of `read_logprobs`: float64 [R, 3 + 2 top]. On a device the work is launched and not waited for.

    tokens int64 [R]; a negative number is no token, and its row's results are meaningless.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    chosen = x.gather(-1, tokens.clamp(min=0)[:, None])
    rank = (x > chosen).sum(-1, keepdim=True) + 1
    value, index = _top_tokens(x, min(top, x.shape[-1]))
    return torch.cat([t.double() for t in (x.logsumexp(-1, keepdim=True), chosen, rank, value, index)], dim=-1)


def read_logprobs(rows: Seq[Seq[float]], tokens: Seq[Token], top: int) -> list[TokenLogprob]:
    """One result for each row of `launch_logprobs`, which may have been launched with a larger `top`."""
    out: list[TokenLogprob] = []
    for token, (norm, own, place, *rest) in zip(tokens, rows, strict=True):
        count = len(rest) // 2
        best = sorted(zip(rest[:count], rest[count:], strict=True), key=lambda each: (-each[0], each[1]))[:top]
        out.append(TokenLogprob(token, own - norm, int(place), tuple((int(i), x - norm) for x, i in best)))
    return out


def _top_tokens(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The `top` largest values of each row and their tokens, both [R, top]: the lowest ids among equals."""
    if x.is_cuda and x.dtype == torch.float32:
        index = top_by_key(x, top)
        return x.gather(-1, index), index
    value, index = x.topk(top, dim=-1)
    if top and bool(((x == value[:, -1:]).sum(-1) > (value == value[:, -1:]).sum(-1)).any()):
        value, index = (part[:, :top] for part in x.sort(dim=-1, descending=True, stable=True))
    return value, index


def top_by_key(x: Tensor, top: int) -> Tensor:
    """int64 [R, top]: the tokens of the largest values of float32 x [R, vocab], the lowest ids among equals.

    Each value and its id are packed into one integer, so that ties need no second pass that waits for the device.
    """
    bits = (x + 0.0).view(torch.int32)  # + 0.0: the two zeros are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # in the order of the values
    keys = (ordered << 32) - torch.arange(x.shape[-1], device=x.device)
    return keys.topk(top, dim=-1).indices
