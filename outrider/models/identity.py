"""Which model a checkpoint holds, whatever it is called and in whatever format it is stored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.tensors import Tensors, open_tensors
from outrider.core.errors import ConfigError
from outrider.models.load import FINAL_NORM_NAME, read_config

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Equal for the same trained weights, quantized or not."""

    vocab_size: int
    hidden_size: int
    layers: int
    norms: str
    """Digest of the norms' weights in bfloat16. No format quantizes them, and training changes them."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def identify(folder: Path) -> ModelIdentity:
    """The model in a folder. ConfigError where it is damaged, or of no native family."""
    config = read_config(folder)
    if config is None:
        raise ConfigError(f"{folder}: only models of a native family are identified")
    with open_tensors(folder) as tensors:
        digest = _norms_digest(tensors, len(config.layers), folder)
    return ModelIdentity(config.vocab_size, config.hidden_size, len(config.layers), digest)


def has_shape(folder: Path, identity: ModelIdentity) -> bool:
    """Whether the config.json in a folder describes a model of these sizes. No weight is read."""
    config = read_config(folder)
    sizes = identity.vocab_size, identity.hidden_size, identity.layers
    return config is not None and (config.vocab_size, config.hidden_size, len(config.layers)) == sizes


def _norms_digest(tensors: Tensors, layers: int, folder: Path) -> str:
    names = [f"model.layers.{i}.{norm}.weight" for i in range(layers) for norm in LAYER_NORMS]
    names.append(FINAL_NORM_NAME)
    if missing := set(names) - tensors.names():
        raise ConfigError(f"{folder} lacks {min(missing)}; download or save the model again")
    digest = sha256()
    for name in names:
        weight = tensors.read(name, torch.device("cpu"), torch.bfloat16)
        digest.update(weight.view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()
