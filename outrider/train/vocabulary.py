"""The reduced vocabulary of a head: the tokens that answers use most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.linear import Int8Linear, Linear
from outrider.train.corpus import Corpus
from outrider.train.target import TargetOutputs


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


@dataclass(frozen=True, slots=True)
class TargetLogits:
    """The target's logits at N rows."""

    logits: Tensor  # [N, outputs]: of the tokens that can be drafted
    log_total: Tensor  # float32 [N]: log of the sum of exp over all its logits


@dataclass(frozen=True, slots=True)
class Losses:
    """For N rows, float32 [N] each. q: the head's distribution over what it drafts; p: the target's over everything."""

    entropy: Tensor
    """The cross entropy of q with p: -p log q, summed over the tokens that can be drafted."""
    distance: Tensor
    """|q - p| summed over the target's vocabulary; q is 0 for a token that cannot be drafted."""
    mass: Tensor
    """The sum of p over the tokens that can be drafted."""


class DraftVocabulary:
    """Compares a head's logits over what it can draft with the target's distribution over everything."""

    def __init__(self, tokens: Tensor | None, decoder: Decoder) -> None:
        """tokens: int64 [outputs], the token of each of the head's columns; None: all, in order."""
        self.tokens, self._decoder = tokens, decoder
        whole = decoder.weights.head
        self._rows = whole if tokens is None else cast("Linear | Int8Linear", whole).take(tokens)
        self._columns = torch.arange(decoder.config.vocab_size, device=decoder.device)
        """int64 [vocab]: the head's column of each token, -1 for none."""
        if tokens is not None:
            self._columns = torch.full_like(self._columns, -1)
            self._columns[tokens] = torch.arange(len(tokens), device=decoder.device)

    @property
    def size(self) -> int:
        return len(self._columns) if self.tokens is None else len(self.tokens)

    def target_ids(self, columns: Tensor) -> Tensor:
        """The tokens of the head's columns. int64 [...] -> int64 [...]"""
        return columns if self.tokens is None else self.tokens[columns]

    def known(self, tokens: Tensor) -> Tensor:
        """Whether tokens can be drafted: int64 [...] -> bool [...]"""
        return self._columns[tokens] >= 0

    @torch.no_grad()
    def target_logits(self, outputs: TargetOutputs, at: Tensor | slice) -> TargetLogits:
        """The target's logits of the tokens that can be drafted, at N rows."""
        hidden, cap = outputs.hidden[at], self._decoder.config.final_softcap
        # uncapped logits stay in the target's dtype: a float32 copy of tensors so large costs more than they do
        logits = self._rows(hidden) if cap is None else self._decoder.logits(hidden, self._rows)
        return TargetLogits(logits, outputs.log_total[at])

    def losses(self, first: Tensor, second: Tensor | None, target: TargetLogits) -> Losses:
        """The losses of the head's logits, given as one or two summands [N, outputs]."""
        if first.is_cuda:
            from outrider.kernels.triton_losses import distance_losses

            return Losses(*distance_losses(first, second, target.logits, target.log_total))
        return plain_losses(first, second, target)


def plain_losses(first: Tensor, second: Tensor | None, target: TargetLogits) -> Losses:
    """The reference of the kernel."""
    logits = first.float() if second is None else first.float() + second.float()
    p = (target.logits.float() - target.log_total[:, None]).exp()
    mass = p.sum(-1)
    entropy = logits.logsumexp(-1) * mass - (p * logits).sum(-1)
    return Losses(entropy, (logits.softmax(-1) - p).abs().sum(-1) + (1 - mass).clamp(min=0), mass)
