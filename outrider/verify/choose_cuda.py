"""The choices of mode `seeded` on a CUDA device: all rows at once, without waiting for the device.

Options that change logits before temperature (bias, penalties, masks, constraints) are applied to a
copy of the logits, for the sequences that have them. Temperature, the four truncations, noise and
the choice itself are kernels over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outrider.core.sequence import Sequence
from outrider.verify.probs import MIN_TEMPERATURE, LogitRows, Positions, apply_processors, positions_of


def choose_rows_cuda(
    logits: Tensor, seqs: Seq[Sequence], rows: Seq[LogitRows], positions: Positions | None = None
) -> Tensor:
    """int64 [N] on the device: the choice of each row of logits [N, vocab], NO_TOKEN where there is none.

    positions() gives int64 [N] on the device, as for `Verifier.decide`.
    """
    from outrider.kernels.triton_sample import sample_tokens
    from outrider.kernels.triton_truncate import Truncation, cutoffs

    logits, params = _process(logits, seqs, rows), [seq.params for seq in seqs]
    if all(p.greedy for p in params):
        return sample_tokens(logits)
    counts = [each.count for each in rows]

    def for_rows(values: list[float]) -> np.ndarray:
        """float64 [N], viewed as int64: each sequence's value, repeated for each of its rows."""
        return np.repeat(np.array(values, dtype=np.float64), counts).view(np.int64)

    seeds = np.repeat(np.array([seq.seed for seq in seqs], dtype=np.uint64), counts).view(np.int64)
    columns = [seeds, for_rows([0.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE) for p in params])]
    truncated = any(not (p.greedy or p.untruncated) for p in params)
    if truncated:
        columns += [np.repeat([p.top_k for p in params], counts), for_rows([p.top_p for p in params])]
        columns += [for_rows([p.min_p for p in params]), for_rows([p.typical_p for p in params])]
    if positions is None:
        columns.append(np.array(positions_of(seqs, rows)))
    words = torch.from_numpy(np.stack(columns)).pin_memory().to(logits.device, non_blocking=True)  # one copy for all
    temperatures, bounds = words[1].view(torch.float64), None
    if truncated:
        top_p, min_p, typical_p = words[3:6].view(torch.float64)
        bounds = cutoffs(logits, Truncation(temperatures.float(), words[2], top_p, min_p.float(), typical_p))
    at = words[-1] if positions is None else positions()
    if len(at) != len(logits):
        raise ValueError(f"positions() must give one position for each of {len(logits)} rows of logits; got {len(at)}")
    return sample_tokens(logits, temperatures, words[0], at, bounds)


def _process(logits: Tensor, seqs: Seq[Sequence], rows: Seq[LogitRows]) -> Tensor:
    """Logits after the options that come before temperature: a copy, where any sequence has such options."""
    if all(seq.unprocessed for seq in seqs):
        return logits
    logits = logits.clone()  # the raw ones are needed again: log-probabilities, errors
    start = 0
    for seq, each in zip(seqs, rows, strict=True):
        if not seq.unprocessed:
            apply_processors(logits[start : start + each.count], seq, each.paths_for(seq))
        start += each.count
    return logits
