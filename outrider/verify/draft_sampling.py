"""How a draft model's logits become draft tokens, with the noise that makes acceptance most likely.

Mode `seeded` uses the target's noise at the token's position, so that draft and target tend to
choose the same token; its tokens state no probabilities. Mode `distribution` draws from the draft's
probabilities with noise of its own, fresh every round, and states them. Both apply the request's
sampling options to the draft's logits first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.draft import TokenPath
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.verify.base import Mode
from outrider.verify.noise import DRAFT, TARGET, gumbel, round_seed
from outrider.verify.probs import apply_temperature, probs_of, process_logits
from outrider.verify.seeded import SeedPosition, choose_after_paths, gumbel_max


def draft_token(
    logits: Tensor, seqs: Seq[Sequence], paths: Seq[TokenPath], mode: Mode
) -> tuple[list[Token], Tensor | None]:
    """One draft token for each row of a draft model's logits [R, vocab], after seqs[r] and then paths[r].

    Second, the probabilities each was drawn from, float64 [R, vocab]; None where every token is
    certain (mode `seeded`, or greedy requests only). A row without a token to choose gives token 0,
    with probability 1.
    """
    if mode == "seeded" or all(seq.params.greedy for seq in seqs):
        return [max(0, token) for token in choose_after_paths(logits, seqs, paths)], None
    probs = _draft_probs(logits, seqs, paths)
    places = [_draft_place(seq, path) for seq, path in zip(seqs, paths, strict=True)]
    return gumbel_max(probs.log(), places, stream=DRAFT)[1].tolist(), probs


def draft_top(logits: Tensor, seq: Sequence, path: TokenPath, k: int, mode: Mode) -> tuple[list[Token], Tensor | None]:
    """At most k different draft tokens for one row of logits [vocab], after seq and then path.

    They are the top k of log q + noise: with fresh noise, k draws without replacement, in order.
    Second, the probabilities q at this parent, float64 [vocab], for all of them; None where the
    tokens are certain, as in `draft_token`. Fewer than k where fewer tokens have probability.
    """
    probs: Tensor | None = None
    if mode == "seeded" or seq.params.greedy:
        scores = process_logits(logits[None], seq, [path])[0].double()
        if not seq.params.greedy:
            position = len(seq.tokens) + len(path)
            scores += gumbel(seq.seed, position, len(scores), stream=TARGET, device=scores.device)
    else:
        probs = _draft_probs(logits[None], [seq], [path])[0]
        scores = probs.log() + gumbel(*_draft_place(seq, path), len(probs), stream=DRAFT, device=probs.device)
    values, tokens = scores.topk(min(k, len(scores)))
    return tokens[values.isfinite()].tolist(), probs


def _draft_probs(logits: Tensor, seqs: Seq[Sequence], paths: Seq[TokenPath]) -> Tensor:
    """Probabilities of each row: float64 [R, vocab]; 1 for token 0 where a row has no token to choose."""
    if all(seq.plain_logits and not seq.params.greedy for seq in seqs):
        probs = probs_of(apply_temperature(logits, [seq.params.temperature for seq in seqs]))
    else:
        rows = zip(logits.split(1), seqs, paths, strict=True)
        probs = torch.cat([probs_of(process_logits(x, seq, [path]), greedy=seq.params.greedy) for x, seq, path in rows])
    certain = torch.zeros_like(probs)
    certain[:, 0] = 1.0
    return torch.where(probs.isnan(), certain, probs)


def _draft_place(seq: Sequence, path: TokenPath) -> SeedPosition:
    """The seed and position of the draft's own noise: this round's seed, at the token's position."""
    return round_seed(seq.draw_seed, len(seq.tokens)), len(seq.tokens) + len(path)
