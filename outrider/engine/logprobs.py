"""Log-probabilities of a round in flight: computed behind it, and copied while the device works on."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.verify.logprobs import launch_logprobs, read_logprobs


class RoundLogprobs:
    """The log-probabilities of the target's choice after every row of the sequences that ask for them.

    A token that a text keeps is the choice after its row: drafts are accepted where they are the target's choices.
    """

    def __init__(self, seqs: Seq[Sequence], drafts: Seq[Draft], logits: Tensor, choices: Tensor) -> None:
        """logits [N, vocab], one row for each text and draft node; choices int64 [N] after each row."""
        self._first: dict[int, int] = {}
        """By sequence id: its first row among those copied."""
        rows: list[int] = []
        row = top = 0
        for seq, draft in zip(seqs, drafts, strict=True):
            count = 1 + len(draft)
            if seq.params.logprobs is not None:
                self._first[seq.id] = len(rows)
                rows += range(row, row + count)
                top = max(top, seq.params.logprobs)
            row += count
        if len(rows) < row:
            index = torch.tensor(rows, dtype=torch.int64)
            index = index.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else index
            logits, choices = logits[index], choices[index]
        self._block = HostCopy(launch_logprobs(logits, choices, top))

    def of(self, seq: Sequence, verdict: Verdict, kept: tuple[Token, ...]) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the kept tokens of a sequence that asks for them."""
        first, block = self._first[seq.id], self._block.list()
        rows = [first, *(first + 1 + node for node in verdict.path)][: len(kept)]
        return tuple(read_logprobs([block[row] for row in rows], kept, seq.params.logprobs or 0))
