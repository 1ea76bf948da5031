"""The choices of mode `seeded` on a CUDA device: every row's options at once, and nothing waited for.

What changes logits before temperature (bias, penalties, masks, constraints) is applied to a copy of
the rows that ask for it. Temperature, the four truncations, noise and the choice itself are kernels
over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outrider.core.sequence import Sequence
from outrider.verify.probs import COLDEST, Rows, touch


def choose_rows(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows], lengths: Tensor | None = None) -> Tensor:
    """int64 [N]: the token each row of logits [N, vocab] takes, NOTHING where there is none; on the device.

    lengths int64 [texts]: the tokens of each text, where only the device knows them.
    """
    from outrider.kernels.triton_sample import sample_tokens
    from outrider.kernels.triton_truncate import Truncation, cutoffs

    logits, laws = _touched(logits, seqs, texts), [seq.params for seq in seqs]
    if all(params.greedy for params in laws):
        return sample_tokens(logits)
    counts = [len(text.depths) for text in texts]
    known = [len(seq.tokens) if lengths is None else 0 for seq in seqs]
    places = [length + depth for length, text in zip(known, texts, strict=True) for depth in text.depths]
    seeds = np.repeat(np.array([seq.seed for seq in seqs], dtype=np.uint64), counts).view(np.int64)

    def each(values: list[float]) -> np.ndarray:
        return np.repeat(np.array(values, dtype=np.float64), counts).view(np.int64)

    columns = [seeds, np.array(places), each([0.0 if p.greedy else max(p.temperature, COLDEST) for p in laws])]
    cut = any(not (params.greedy or params.untruncated) for params in laws)
    if cut:
        columns += [np.repeat([p.top_k for p in laws], counts), each([p.top_p for p in laws])]
        columns += [each([p.min_p for p in laws]), each([p.typical_p for p in laws])]
    words = torch.from_numpy(np.stack(columns)).pin_memory().to(logits.device, non_blocking=True)
    temperatures = words[2].view(torch.float64)
    ends = None
    if cut:
        top_p, min_p, typical_p = words[4:].view(torch.float64)
        ends = cutoffs(logits, Truncation(temperatures.float(), words[3], top_p, min_p.float(), typical_p))
    positions = words[1] if lengths is None else words[1] + _for_each_row(lengths, counts)
    return sample_tokens(logits, temperatures, words[0], positions, ends)


def _for_each_row(values: Tensor, counts: list[int]) -> Tensor:
    """values [texts] -> [rows]: each as often as its text has rows."""
    which = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    return values[which.pin_memory().to(values.device, non_blocking=True)]


def _touched(logits: Tensor, seqs: Seq[Sequence], texts: Seq[Rows]) -> Tensor:
    """Logits with what comes before temperature applied: a copy, where any text asks for it."""
    if all(seq.untouched for seq in seqs):
        return logits
    logits = logits.clone()  # the target's own are asked for again: log-probabilities, errors
    start = 0
    for seq, text in zip(seqs, texts, strict=True):
        if not seq.untouched:
            touch(logits[start : start + len(text.depths)], seq, text.paths())
        start += len(text.depths)
    return logits
