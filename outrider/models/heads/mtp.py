"""MTP modules (multi-token prediction) that models are pretrained with: one layer, applied again for each draft token.

Where a checkpoint holds several, only the first is used and drafts every token, as EAGLE's head does: the others were
trained on outputs of the first at every position, and would need passes and caches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.models.decoder import Attend, Decoder
from outrider.models.heads.checkpoint import check_target, load_weights, parse_head_config
from outrider.models.heads.config import HeadConfig, HeadKind
from outrider.models.heads.files import HeadFiles, open_head
from outrider.models.heads.layers import HeadLayer, RMSNorm, Rotary
from outrider.models.heads.packed import pack_linears
from outrider.models.heads.vocabulary import VocabularyHead

_KINDS: Seq[HeadKind] = ("mtp",)


class MtpHead(VocabularyHead):
    """Reads a token and the hidden state before it: the target's or, beyond what the target has read, its own."""

    skip = 1

    def __init__(self, config: HeadConfig, decoder: Decoder) -> None:
        super().__init__(config, decoder)
        hidden, eps = config.hidden_size, config.norm_eps
        self.rotary = Rotary(config)
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.bias)
        self.layers = nn.ModuleList([HeadLayer(config, 0)])
        self.norm = RMSNorm(hidden, eps)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last layer [N, hidden] -> [N, hidden]"""
        return features if self.config.raw_hidden else self.decoder.weights.norm(features)

    def step(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The output is taken after the final norm."""
        embedded = self.embedding_norm(self.embed(ids).to(hidden.dtype))
        both = [embedded, self.hidden_norm(hidden)]
        x = self.fc(torch.cat(both[::-1] if self.config.hidden_first else both, -1))
        return self.norm(self.layers[0](x, self.rotary(positions), attend))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output_logits(hidden)


def open_mtp(name: str) -> HeadFiles:
    """The first MTP module of a checkpoint. ConfigError where there is none."""
    files = open_head(name)
    if files.mtp is None:
        raise ConfigError(
            f"{name} holds no MTP module; name a checkpoint that holds one for this target (mtp:model=FOLDER), or "
            "choose another drafter, for example suffix"
        )
    return files


def load_mtp(name: str, decoder: Decoder) -> MtpHead:
    """The first MTP module of a checkpoint, for drafting with this target. ConfigError where there is none for it."""
    files = open_mtp(name)
    config = check_target(parse_head_config(files), decoder.config, name=name, kinds=_KINDS)
    head = MtpHead(config, decoder)
    load_weights(head, files)
    if config.unit_offset:
        with torch.no_grad():
            for module in head.modules():
                if isinstance(module, RMSNorm):
                    module.weight.add_(1)
    if decoder.weights.packed:
        pack_linears(head)
    return head.to(decoder.device, decoder.dtype).eval().requires_grad_(False)
