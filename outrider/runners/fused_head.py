"""A head that drafts token by token with the fused CUDA kernels: what `Head.step` and `Head.logits` compute.

See fused_layers.py. Attention waits for all that was launched before: it reads keys that the step before wrote.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from outrider.kernels.batch import RowPlaces
from outrider.kernels.triton_heads import join_rows
from outrider.models.heads.eagle import Eagle1Head, Eagle3Head
from outrider.models.heads.layers import HeadLayer, RMSNorm
from outrider.models.heads.mtp import MtpHead
from outrider.runners.attention import AttentionLayers
from outrider.runners.fused_layers import AttendRows, FusedLayers, folded, pack_layer, supports_layers
from outrider.runners.paged_model import PagedModel

StepHead = Eagle1Head | Eagle3Head | MtpHead


def supports(head: StepHead) -> bool:
    """Whether the fused kernels compute all that this head does."""
    return supports_layers(head.config, head.fc.weight.dtype, head.decoder.dtype)


class FusedHead(FusedLayers):
    """Holds copies of a head's weights, and of a reduced output head."""

    def __init__(self, head: StepHead, model: PagedModel, layers: AttentionLayers, *, pdl: bool = True) -> None:
        """pdl: a kernel begins while the one before it ends (programmatic dependent launch)."""
        config = head.config
        super().__init__(config, model, layers, pdl=pdl)
        self.head = head
        own = cast("list[HeadLayer]", list(head.layers))
        direct = config.kind == "eagle3"  # its first attention reads embedding and hidden state side by side
        self._layers = [pack_layer(each, None if direct and i == 0 else _norm_of(each)) for i, each in enumerate(own)]
        self._fc = None if direct else head.fc
        self._norms = _entry_norms(head)
        self._final: RMSNorm | None = None if config.kind == "eagle" else cast(Any, head).norm
        """The norm after the last layer."""
        self._final_weight = None if self._final is None else self._final.weight.float()
        self._norm_output = config.kind == "mtp" or config.norm_output
        """Whether the next step reads hidden states after that norm."""
        self._output: Tensor | None = None

    def step(self, ids: Tensor, hidden: Tensor, places: RowPlaces, attend: AttendRows) -> Tensor:
        """int64 [N], [N, hidden] of the positions before -> [N, hidden]; keys and values are written to `places`."""
        config, hidden, ids = self.config, hidden.contiguous(), ids.contiguous()
        joined = hidden.new_empty(len(hidden), 2 * config.hidden_size)
        residual = torch.empty_like(hidden) if config.norm_before_residual else None
        own = self.head.embed_tokens
        join_rows(
            self.head.decoder.weights.embedding if own is None else own.weight, ids, hidden, self._norms, joined,
            residual, eps=self.eps, hidden_first=config.hidden_first, pdl=self.pdl,
        )  # fmt: skip
        x, read = hidden if residual is None else residual, joined
        if self._fc is not None:
            x = torch.empty_like(hidden)
            self.linear(joined, self._fc.weight, x, residual=self._fc.bias)
            read = x
        for number, layer in enumerate(self._layers):
            x = self.run_layer(number, layer, read, x, places, attend)
            read = x
        return self.normed(x, self._final_weight) if self._norm_output and self._final_weight is not None else x

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, outputs]"""
        norm = None if self._norm_output else self._final
        inside = norm is not None and bool(self.config.draft_vocab_size)  # a whole output head is the target's own
        if self._output is None:  # when first asked for, as the head itself does
            rows = cast(Tensor, cast(Any, self.head.output_head()).weight)
            self._output = folded(rows, norm) if norm is not None and inside else rows
        hidden = hidden.contiguous()
        if self._final_weight is not None and norm is not None and not inside:
            hidden = self.normed(hidden, self._final_weight)
        out = torch.empty(len(hidden), len(self._output), dtype=torch.float32, device=hidden.device)
        self.linear(hidden, self._output, out, normed=inside)
        return out


def _norm_of(layer: HeadLayer) -> RMSNorm | None:
    return layer.input_layernorm


def _entry_norms(head: StepHead) -> Tensor | None:
    """float32 [2, hidden]: the norms of embedding and hidden state, where a head has them."""
    if head.config.kind == "eagle":
        return None
    if head.config.kind == "mtp":
        module = cast(MtpHead, head)
        pair = module.embedding_norm, module.hidden_norm
    else:
        first = cast(HeadLayer, head.layers[0])
        pair = cast(RMSNorm, first.input_layernorm), cast(RMSNorm, first.hidden_norm)
    return torch.stack([norm.weight.float() for norm in pair])
