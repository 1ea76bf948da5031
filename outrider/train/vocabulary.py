"""The reduced vocabulary of a head: the tokens that answers use most."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.train.corpus import Corpus


def token_counts(corpus: Corpus, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each token of the target's vocabulary occurs in the chosen answers, prompts left out."""
    parts = [corpus.text(int(i))[corpus.prompt_lens[i] :] for i in chosen]
    found = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return np.bincount(found, minlength=corpus.index.vocab_size)


def frequent_tokens(counts: NDArray[np.int64], size: int) -> Tensor:
    """The `size` most frequent token ids, ascending: int64 [size]. Of equally frequent ones, the smaller ids."""
    if not 0 < size <= len(counts):
        raise ConfigError(f"a draft vocabulary has 1 to {len(counts)} tokens, the target's own; got {size}")
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(order).astype(np.int64))


def coverage(counts: NDArray[np.int64], tokens: Tensor) -> float:
    """The share of the answers' tokens that a draft vocabulary holds."""
    return float(counts[tokens.numpy()].sum() / max(1, counts.sum()))


class DraftVocabulary:
    """Compares a head's logits over what it can draft with the target's over everything."""

    def __init__(self, tokens: Tensor | None, vocab_size: int, device: torch.device) -> None:
        """tokens: int64 [outputs], the token of each of the head's columns; None: all, in order."""
        self.tokens = tokens
        self._columns = torch.arange(vocab_size, device=device)
        """int64 [vocab]: the head's column of each token, -1 for none."""
        if tokens is not None:
            self._columns = torch.full((vocab_size,), -1, device=device)
            self._columns[tokens] = torch.arange(len(tokens), device=device)

    def target_ids(self, columns: Tensor) -> Tensor:
        """The tokens of the head's columns. int64 [...] -> int64 [...]"""
        return columns if self.tokens is None else self.tokens[columns]

    def l1(self, logits: Tensor, target_logits: Tensor) -> Tensor:
        """|q - p| summed over the target's vocabulary. float32 [N, outputs], float32 [N, vocab] -> [N]

        The head gives what it cannot draft no probability, so that the target's counts there in full.
        """
        with torch.no_grad():
            total = target_logits.logsumexp(-1, keepdim=True)
            chosen = target_logits if self.tokens is None else target_logits[:, self.tokens]
            p = (chosen - total).exp()
            outside = (1 - p.sum(-1)).clamp(min=0)
        return (logits.softmax(-1) - p).abs().sum(-1) + outside

    def restricted(self, target_logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distribution among what can be drafted, [N, outputs], and whether its best token is: bool [N]"""
        if self.tokens is None:
            return target_logits.softmax(-1), torch.ones_like(target_logits[:, 0], dtype=torch.bool)
        known = self._columns[target_logits.argmax(-1)] >= 0
        return target_logits[:, self.tokens].softmax(-1), known

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log q of the labels, 0 for those that cannot be drafted. float32 [N, outputs], int64 [N] -> [N]"""
        return F.cross_entropy(logits, self._columns[labels], reduction="none", ignore_index=-1)
