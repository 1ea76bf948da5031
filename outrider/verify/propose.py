"""How a model drafts: from its own logits to tokens, with the noise that makes them most likely to stand.

Mode `seeded` uses the target's noise at the token's place, so that draft and target tend to
choose alike; its guesses need no stated law. Mode `distribution` draws from the draft's law with
noise of its own, fresh every round, and states that law. Both shape the draft's logits by the
request's options first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.verify.base import Mode
from outrider.verify.coupled import Place, choose_after, noisy_best
from outrider.verify.noise import DRAFT, TARGET, gumbel, round_seed
from outrider.verify.probs import Path, apply_temperature, law, process_logits


def draft_token(logits: Tensor, seqs: Seq[Sequence], paths: Seq[Path], mode: Mode) -> tuple[list[Token], Tensor | None]:
    """One guess for each row of a draft model's logits [R, vocab], scored after seqs[r] and paths[r].

    The second part is the law each was drawn from, float64 [R, vocab]; None where every guess
    is certain (mode `seeded`, or greedy requests only). A row that offers nothing yields token 0,
    as certain: a guess like any other.
    """
    if mode == "seeded" or all(seq.params.greedy for seq in seqs):
        chosen = choose_after(logits, seqs, [[path] for path in paths])
        return [max(0, token) for (token,) in chosen], None
    laws = _laws_after(logits, seqs, paths)
    places = [_draft_place(seq, path) for seq, path in zip(seqs, paths, strict=True)]
    return noisy_best(laws.log(), places, stream=DRAFT)[1].tolist(), laws


def draft_top(logits: Tensor, seq: Sequence, path: Path, k: int, mode: Mode) -> tuple[list[Token], Tensor | None]:
    """At most k different guesses for one row of logits [vocab], scored after seq and path.

    They are the top k of log q + noise: with fresh noise, k draws without replacement, in order.
    The second part is the law at this parent, float64 [vocab], for every one of them; None where
    the guesses are certain, as in `draft_token`. Fewer than k where the law holds fewer tokens.
    """
    position = len(seq.tokens) + len(path)
    stated: Tensor | None = None
    if mode == "seeded" or seq.params.greedy:
        scores = process_logits(logits[None], seq, [path])[0].double()
        if not seq.params.greedy:
            scores += gumbel(seq.seed, position, len(scores), stream=TARGET, device=scores.device)
    else:
        stated = _laws_after(logits[None], [seq], [path])[0]
        scores = stated.log() + gumbel(*_draft_place(seq, path), len(stated), stream=DRAFT, device=stated.device)
    values, tokens = scores.topk(min(k, len(scores)))
    return tokens[values.isfinite()].tolist(), stated


def _laws_after(logits: Tensor, seqs: Seq[Sequence], paths: Seq[Path]) -> Tensor:
    """The law of each row of logits: float64 [R, vocab]; certain of token 0 where a row offers nothing."""
    if all(seq.plain_logits and not seq.params.greedy for seq in seqs):
        laws = law(apply_temperature(logits, [seq.params.temperature for seq in seqs]))
    else:
        rows = zip(logits.split(1), seqs, paths, strict=True)
        laws = torch.cat([law(process_logits(x, seq, [path]), greedy=seq.params.greedy) for x, seq, path in rows])
    certain = torch.zeros_like(laws)
    certain[:, 0] = 1.0
    return torch.where(laws.isnan(), certain, laws)


def _draft_place(seq: Sequence, path: Path) -> Place:
    """Where the draft's own noise is looked up: this round's, at the token's place."""
    return round_seed(seq.seed, len(seq.tokens)), len(seq.tokens) + len(path)
