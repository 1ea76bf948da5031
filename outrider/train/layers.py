"""Searches the layers that a target best leaves out where it drafts for itself, on its own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.core.sampling import check_int
from outrider.models.decoder import Attend, Decoder
from outrider.models.load import weight_bytes
from outrider.train.config import MAX_LENGTH
from outrider.train.corpus import Corpus
from outrider.train.packing import PADDING, PackedRows, pack
from outrider.train.target import TextAttention, additive, attention, text_mask

MAX_DRAFT = 8
PATIENCE = 3  # the search ends after so many layers without a gain


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """A set of layers to leave out, and the expected speed-up."""

    skip: tuple[int, ...]
    agreement: float
    """How often the other layers choose the target's next token, given the target's own keys and values before."""
    cost: float
    """Bytes of weights that a draft step reads, as a share of the target's."""
    k: int
    """Tokens to draft a round."""
    speedup: float
    """Expected, where time is proportional to the bytes read and rows are free."""


def search_rows(corpus: Corpus, tokens: int, length: int) -> PackedRows:
    """About so many tokens of the first answers, packed into rows of `length`."""
    check_int("tokens", tokens, 16, 1 << 24)
    check_int("length", length, 8, MAX_LENGTH)
    sizes = np.minimum(np.diff(corpus.starts), length)
    count = 1 + int(np.searchsorted(np.cumsum(sizes), tokens))
    return pack(corpus, np.arange(min(count, len(corpus))), length)


class LayerSearch:
    """Leaves out one layer after another, each time the one that costs the least agreement."""

    def __init__(self, decoder: Decoder, rows: PackedRows) -> None:
        """rows: the target's own answers, on its device."""
        if decoder.config.attention_softcap is not None:
            raise ConfigError(f"{decoder.config.model_type}: attention with a soft cap is not supported here")
        self.decoder, self.rows = decoder, rows
        decoder.reserve(rows.tokens.shape[1])
        self._attention = TargetAttention(decoder, rows)
        hidden = self._forward(decoder, self._attention)
        following = rows.in_answer.roll(-1, 1) & (rows.texts == rows.texts.roll(-1, 1)) & (rows.texts != PADDING)
        following[:, -1] = False  # rolled over from the first token
        self._judged = following.flatten().nonzero().flatten()
        if not len(self._judged):
            raise ConfigError("no answers to search on; collect some with `outrider train collect`")
        self._choices = self._argmax(hidden)

    def search(self, report: Callable[[LayerChoice], None] = lambda _: None) -> LayerChoice:
        """The best layers found to leave out. `report` sees every step."""
        count, skip, best = len(self.decoder.config.layers), (), None
        vain = 0
        while len(skip) < count - 1 and vain < PATIENCE:
            tried = [self.judge((*skip, layer)) for layer in range(count) if layer not in skip]
            found = max(tried, key=lambda choice: choice.agreement)
            skip = found.skip
            report(found)
            vain = 0 if best is None or found.speedup > best.speedup else vain + 1
            best = found if not vain else best
        if best is None:
            raise ConfigError(f"a model of {count} layers has none to leave out")
        return best

    @torch.no_grad()
    def judge(self, skip: Seq[int]) -> LayerChoice:
        """Evaluate drafting without these layers."""
        decoder, left_out = self.decoder, tuple(sorted(skip))
        kept = [i for i in range(len(decoder.config.layers)) if i not in left_out]
        config = replace(decoder.config, layers=tuple(decoder.config.layers[i] for i in kept))
        weights = replace(decoder.weights, layers=[decoder.weights.layers[i] for i in kept])
        part = Decoder(config, weights, decoder.dtype)
        part.reserve(self.rows.tokens.shape[1])
        choices = self._argmax(self._forward(part, self._attention.of_layers(kept)))
        agreement = float((choices == self._choices).double().mean())
        cost = weight_bytes(config, decoder.dtype) / weight_bytes(decoder.config, decoder.dtype)
        k, speedup = best_length(agreement, cost)
        return LayerChoice(left_out, agreement, cost, k, speedup)

    @torch.no_grad()
    def _forward(self, decoder: Decoder, attend: Attend) -> Tensor:
        return decoder.forward(self.rows.tokens.flatten(), self.rows.positions.flatten(), attend)

    @torch.no_grad()
    def _argmax(self, hidden: Tensor) -> Tensor:
        """The token with the highest logit at every position that is judged."""
        parts = hidden[self._judged].split(4096)
        return torch.cat([self.decoder.logits(part).argmax(-1) for part in parts])


class TargetAttention:
    """The target's attention over packed rows; it keeps the keys and values of every layer."""

    def __init__(self, decoder: Decoder, rows: PackedRows) -> None:
        self._attend, self._decoder, self._texts = TextAttention(decoder, rows), decoder, rows.texts
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept[layer] = k.clone(), v.clone()
        return self._attend(layer, q, k, v)

    def of_layers(self, layers: Seq[int]) -> Attend:
        """Attention of a first draft step at every position: the target's keys and values before it, and its own."""
        texts, config = self._texts, self._decoder.config
        rows, length = texts.shape
        own = torch.eye(length, dtype=torch.bool, device=texts.device)
        at = torch.arange(length, device=texts.device)
        masks: dict[int | None, Tensor] = {}
        for window in {config.layers[i].window for i in layers}:
            before = text_mask(texts) & ~own
            if window is not None:
                before &= at[:, None] - at[None, :] < window
            masks[window] = additive(torch.cat([before, own.expand_as(before)], -1), self._decoder.dtype)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            number = layers[layer]
            keys, values = self.kept[number]
            q, k, v, keys, values = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in (q, k, v, keys, values))
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            out = attention(q, k, v, masks[config.layers[number].window], config.attention_scale)
            return out.transpose(1, 2).flatten(2).flatten(0, 1)

        return attend


def best_length(acceptance: float, cost: float) -> tuple[int, float]:
    """The draft length with the most tokens per byte read, and the ratio of that to plain decoding."""
    return max(_lengths(acceptance, cost), key=lambda each: each[1])


def _lengths(acceptance: float, cost: float) -> Iterator[tuple[int, float]]:
    for k in range(1, MAX_DRAFT + 1):
        tokens = sum(acceptance**i for i in range(k + 1))
        yield k, tokens / (1 + k * cost)
