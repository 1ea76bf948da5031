"""Where checkpoints keep their MTP modules (multi-token prediction), by the names of their tensors.

A module is a projection of a token's embedding and a hidden state, each after a norm, then an ordinary layer and a
final norm. It is stored with the model it was trained with; there may be several modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The names of one kind of checkpoint."""

    prefix: str
    """A pattern of the prefix that all names of a module share."""
    names: Mapping[str, str]
    """The parts of a module besides its layer: stored name -> name in `MtpHead`."""
    hidden_first: bool = False
    """The projection reads the hidden state before the embedding."""
    raw_hidden: bool = False
    """The hidden state is the target's before its final norm."""

    @property
    def projection(self) -> str:
        """The stored name of the projection, by which a module is known."""
        return next(stored for stored, known in self.names.items() if known == "fc")

    def known_name(self, stored: str) -> str:
        """The name of a tensor in `MtpHead`. stored: its name in the checkpoint, without the prefix."""
        for name, known in self.names.items():
            if stored.startswith(f"{name}."):
                return known + stored.removeprefix(name)
        return stored if stored.startswith("layers.") else f"layers.0.{stored}"


LAYOUTS = {
    "DeepSeek-V3": MtpLayout(
        r"model\.layers\.\d+\.",
        {
            "enorm": "embedding_norm",
            "hnorm": "hidden_norm",
            "eh_proj": "fc",
            "shared_head.norm": "norm",
            "shared_head.head": "lm_head",
            "embed_tokens": "embed_tokens",
        },
    ),
    "Qwen3-Next": MtpLayout(
        r"mtp\.",
        {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "fc", "norm": "norm"},
    ),
    "MiMo": MtpLayout(
        r"model\.mtp_layers\.\d+\.",
        {
            "token_layernorm": "embedding_norm",
            "hidden_layernorm": "hidden_norm",
            "input_proj": "fc",
            "final_layernorm": "norm",
        },
        hidden_first=True,
        raw_hidden=True,
    ),
}
"""Layouts by the models that introduced them.

The models' own code, vLLM and SGLang agree on the order of the projection's inputs. The target's hidden state is taken
after its final norm; MiMo's authors take it before that norm (vLLM's `MiMoModel`).
"""


def mtp_modules(names: Iterable[str]) -> dict[str, MtpLayout]:
    """The prefix and layout of every module among a checkpoint's tensors, the first module first."""
    found: list[tuple[int, str, MtpLayout]] = []
    for name in names:
        for layout in LAYOUTS.values():
            match = re.fullmatch(rf"({layout.prefix}){re.escape(layout.projection)}\.weight", name)
            if match:
                number = re.search(r"\d+", match[1])
                found.append((int(number[0]) if number else 0, match[1], layout))
    return {prefix: layout for _, prefix, layout in sorted(found, key=lambda each: each[0])}


def mtp_tensors(names: Iterable[str]) -> set[str]:
    """The tensors of a checkpoint that belong to MTP modules, and not to the model itself."""
    names = list(names)
    prefixes = tuple(mtp_modules(names))
    return {name for name in names if prefixes and name.startswith(prefixes)}
