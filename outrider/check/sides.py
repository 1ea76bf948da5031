"""One model of a pair, opened without its weights, and the licence that its files name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.checkpoints.folder import gguf_of
from outrider.checkpoints.gguf.header import read_header
from outrider.models.config import DecoderConfig
from outrider.models.tokenizer import Tokenizer
from outrider.plan.facts import ModelFacts

RECURRENT_KEYS = (
    "state_size",
    "ssm_cfg",
    "mamba_d_state",
    "mamba_d_ssm",
    "time_step_rank",
    "rwkv_version",
    "lru_width",
)
RECURRENT_LAYERS = ("mamba", "linear_attention", "recurrent", "conv")
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
RESTRICTED = ("-nc", "noncommercial", "non-commercial", "research", "academic")
README_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Side:
    """One whole model of a pair: its headers, configuration and tokenizer."""

    name: str
    folder: Path
    facts: ModelFacts
    config: DecoderConfig | None
    """The native decoder's configuration; None: the model runs on Transformers' code."""
    tokenizer: Tokenizer

    @property
    def rows(self) -> int:
        """The width of its logits."""
        if self.config is not None:
            return self.config.vocab_size
        given = text_values(self.facts.config_json).get("vocab_size")
        return given if isinstance(given, int) else self.tokenizer.vocab_size

    @property
    def context(self) -> int:
        """Max tokens of a text; 0 where the configuration does not say."""
        if self.config is not None:
            return self.config.max_positions
        values = text_values(self.facts.config_json)
        return next((values[key] for key in CONTEXTS if isinstance(values.get(key), int)), 0)

    @property
    def recurrent(self) -> bool:
        """Whether the model keeps a state that cannot be rolled back, by the keys of its configuration."""
        values = text_values(self.facts.config_json)
        layers = values.get("layer_types") or values.get("layers_block_type") or []
        kinds = [str(each) for each in layers] if isinstance(layers, list) else []
        return any(values.get(key) for key in RECURRENT_KEYS) or any(
            word in kind for kind in kinds for word in RECURRENT_LAYERS
        )


def text_values(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, merged with the `text_config` in it, if any, which takes precedence."""
    inner = config_json.get("text_config")
    return {**config_json, **inner} if isinstance(inner, dict) else dict(config_json)


def open_side(facts: ModelFacts, folder: Path) -> Side:
    """Open one model of a pair. ConfigError where its configuration or its tokenizer cannot be read."""
    return Side(facts.name, folder, facts, facts.decoder(), Tokenizer.from_folder(folder))


def licence_of(facts: ModelFacts) -> str:
    """The licence named in config.json, a GGUF file's metadata, or the head of README.md; empty where none is."""
    folder = facts.folder
    named = facts.config_json.get("license")
    if isinstance(named, str) and named:
        return named.lower()
    if folder is None:
        return ""
    if reference := gguf_of(folder):
        told = read_header(reference.checked_file()).metadata.get("general.license")
        return told.lower() if isinstance(told, str) else ""
    readme = folder / "README.md"
    if not readme.is_file():
        return ""
    with readme.open(encoding="utf-8", errors="replace") as file:
        match = re.match(r"---\n.*?^license:\s*(\S+)", file.read(README_BYTES), re.DOTALL | re.MULTILINE)
    return match[1].strip("'\"").lower() if match else ""


def is_restricted(licence: str) -> bool:
    """Whether a licence may forbid some use, by its name."""
    return any(word in licence for word in RESTRICTED)
