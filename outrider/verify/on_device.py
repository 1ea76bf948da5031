"""The choices of mode `seeded` on a CUDA device: every row's options at once, and nothing waited for.

What changes logits before temperature (bias, penalties, masks, constraints) is applied to a copy of
the rows that ask for it. Temperature, top-k, top-p, min-p, noise and the choice itself are two
kernels over all rows. typical-p, which keeps no simple range of logits, goes by the plain rule.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outrider.core import SamplingParams, Sequence
from outrider.verify.law import COLDEST, Rows, shape_logits, touch

_SHAPED = SamplingParams(temperature=1.0)  # of rows whose law is shaped already


def choose_rows(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows]) -> Tensor:
    """int64 [N]: the token each row of logits [N, vocab] takes, NOTHING where there is none; on the device."""
    from outrider.kernels.triton_sample import choose, cutoffs

    logits, laws = _touched(logits, seqs, texts)
    if all(params.greedy for params in laws):
        return choose(logits)
    counts = [len(text.depths) for text in texts]
    places = [len(seq.tokens) + depth for seq, text in zip(seqs, texts, strict=True) for depth in text.depths]
    seeds = np.repeat(np.array([seq.seed for seq in seqs], dtype=np.uint64), counts).view(np.int64)

    def each(values: list[float]) -> np.ndarray:
        return np.repeat(np.array(values, dtype=np.float64), counts).view(np.int64)

    columns = [seeds, np.array(places), each([0.0 if p.greedy else max(p.temperature, COLDEST) for p in laws])]
    cut = any(not (params.greedy or params.untruncated) for params in laws)
    if cut:
        columns += [np.repeat([p.top_k for p in laws], counts), each([p.top_p for p in laws])]
        columns += [each([p.min_p for p in laws])]
    words = torch.from_numpy(np.stack(columns)).pin_memory().to(logits.device, non_blocking=True)
    temperatures = words[2].view(torch.float64)
    least = None
    if cut:
        top_p, min_p = words[4].view(torch.float64), words[5].view(torch.float64).float()
        least = cutoffs(logits, temperatures.float(), words[3], top_p, min_p)
    return choose(logits, temperatures, words[0], words[1], least)


def _touched(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows]) -> tuple[Tensor, list[SamplingParams]]:
    """Logits with what comes before temperature applied, and what is left to do to each text's rows."""
    laws = [seq.params for seq in seqs]
    if all(seq.untouched and seq.params.typical_p == 1 for seq in seqs):
        return logits, laws
    logits = logits.clone()  # the target's own are asked for again: log-probabilities, errors
    start = 0
    for i, (seq, text) in enumerate(zip(seqs, texts, strict=True)):
        rows = logits[start : start + len(text.depths)]
        start += len(text.depths)
        if seq.params.typical_p < 1 and not seq.params.greedy:
            rows.copy_(shape_logits(rows, seq, text.paths()))
            laws[i] = _SHAPED
        elif not seq.untouched:
            touch(rows, seq, text.paths())
    return logits, laws
