"""EAGLE's heads: one layer, seldom more, that reads a token and the hidden state before it.

EAGLE-1 (and 2, which is its tree) reads the target's last hidden state and predicts the next one. EAGLE-3 reads several
layers of the target and, beyond what the target has read, its own output, whatever that is; 3.1 normalizes both.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.models.decoder import Attend, Decoder
from outrider.models.heads.checkpoint import HeadFiles, check_target, load_weights, open_head, parse_head_config
from outrider.models.heads.config import HeadConfig, HeadKind
from outrider.models.heads.layers import HeadLayer, RMSNorm, Rotary
from outrider.models.heads.packed import pack_linears
from outrider.models.heads.vocabulary import VocabularyHead


class Eagle1Head(VocabularyHead):
    """Reads the target's output after its final norm, and predicts that output at the next position."""

    skip = 1

    def __init__(self, config: HeadConfig, decoder: Decoder) -> None:
        super().__init__(config, decoder)
        self.rotary = Rotary(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList(HeadLayer(config, i, input_norm=i > 0) for i in range(config.layers))

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last layer [N, hidden] -> [N, hidden]"""
        return self.decoder.weights.norm(features)

    def step(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        rotation = self.rotary(positions)
        x = self.fc(torch.cat([self.embed(ids).to(hidden.dtype), hidden], -1))
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output_logits(hidden)


class Eagle3Head(VocabularyHead):
    """Reads several layers of the target or, beyond what the target has read, its own last output."""

    skip = 1

    def __init__(self, config: HeadConfig, decoder: Decoder) -> None:
        super().__init__(config, decoder)
        taps, hidden, wide = len(config.taps), config.hidden_size, config.target_hidden_size
        self.rotary = Rotary(config)
        self.input_norm = RMSNorm(taps * wide, config.norm_eps) if config.norm_before_fc else None
        norms = [RMSNorm(wide, config.norm_eps) for _ in config.taps]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(taps * wide, hidden, bias=config.bias)
        first = HeadLayer(config, 0, inputs=2 * hidden, hidden_norm=True)
        self.layers = nn.ModuleList([first, *(HeadLayer(config, i) for i in range(1, config.layers))])
        self.norm = RMSNorm(hidden, config.norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        """[N, taps * target hidden] -> [N, hidden]"""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.split(self.config.target_hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def step(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """In EAGLE-3.1 the output is taken after the final norm."""
        rotation = self.rotary(positions)
        first, *others = cast("list[HeadLayer]", list(self.layers))
        embedded = cast("RMSNorm", first.input_layernorm)(self.embed(ids).to(hidden.dtype))
        normed = cast("RMSNorm", first.hidden_norm)(hidden)
        residual = normed if self.config.norm_before_residual else hidden
        x = first(residual, rotation, attend, torch.cat([embedded, normed], -1))
        for layer in others:
            x = layer(x, rotation, attend)
        return self.norm(x) if self.config.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output_logits(hidden if self.config.norm_output else self.norm(hidden))


EagleHead = Eagle1Head | Eagle3Head


def make_eagle(config: HeadConfig, decoder: Decoder) -> EagleHead:
    """A head whose weights are still to be set, in float32 on the CPU. config: complete, see `check_target`."""
    if config.kind == "eagle":
        return Eagle1Head(config, decoder)
    return Eagle3Head(config, decoder)


def load_eagle(name: str, decoder: Decoder, kinds: Seq[HeadKind] = ("eagle", "eagle3")) -> EagleHead:
    """The head of a checkpoint, for drafting with this target. ConfigError where it does not belong to it."""
    files = open_head(name)
    config = check_target(parse_head_config(files), decoder.config, name=name, kinds=kinds)
    if config.kind == "eagle":
        config = replace(config, own_head=False)  # some store a copy of the target's
    if config.own_embedding and _is_the_targets(files, decoder):
        config = replace(config, own_embedding=False)
    if config.hidden_size != config.target_hidden_size and not (config.own_embedding and config.own_head):
        raise ConfigError(
            f"{name} has a hidden size of {config.hidden_size} and its target one of {config.target_hidden_size}, so "
            "that it needs an embedding and an output head of its own, which the checkpoint lacks; download it again"
        )
    head = make_eagle(config, decoder)
    load_weights(head, files)
    tokens = head.tokens()
    if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
        raise ConfigError(f"{name}: d2t names tokens beyond the target's {config.vocab_size}; download the head again")
    if decoder.weights.packed:
        pack_linears(head)
    return head.to(decoder.device, decoder.dtype).eval().requires_grad_(False)


def _is_the_targets(files: HeadFiles, decoder: Decoder) -> bool:
    """Whether the checkpoint's embedding is a copy of the target's."""
    own = decoder.weights.embedding
    if files.shapes["embed_tokens.weight"] != tuple(own.shape):
        return False
    return torch.equal(files.read("embed_tokens.weight").to(own.device, own.dtype), own)
