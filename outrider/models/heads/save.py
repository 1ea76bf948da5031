"""Writes a head in the `speculators` layout, which vLLM loads too."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.checkpoints.folder import INDEX_FILE
from outrider.checkpoints.storage import scratch_folder
from outrider.core.errors import ConfigError
from outrider.models.config import DecoderConfig, RopeConfig
from outrider.models.decoder import Decoder
from outrider.models.families import FAMILIES
from outrider.models.heads.config import HeadConfig
from outrider.models.identity import ModelIdentity
from outrider.models.linear import Linear

IDENTITY = "target_identity"
"""Key of config.json: the model that the head was made for."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a head's checkpoint says of its target."""

    name: str
    """Folder or Hugging Face id."""
    config: DecoderConfig
    identity: ModelIdentity | None = None
    """None: not known, for example where the target is in no folder."""


def with_lm_head(tensors: Mapping[str, Tensor], decoder: Decoder) -> dict[str, Tensor]:
    """A head's tensors with `lm_head.weight`: the rows of the target's output head that a reduced vocabulary drafts.

    vLLM does not gather them itself. ConfigError where the head drafts from the whole vocabulary: it has no such rows.
    """
    if "d2t" not in tensors:
        raise ConfigError("this head drafts from the whole vocabulary, for which readers take the target's output head")
    d2t = tensors["d2t"]
    rows = cast(Linear, decoder.weights.head).take(torch.arange(len(d2t), device=d2t.device) + d2t)
    return {**tensors, "lm_head.weight": rows.weight}


def write_head(
    folder: Path,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    target: TargetFacts,
    *,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    max_file_bytes: int = 1 << 40,
) -> None:
    """Write a head's `state_dict` and configuration; the folder is never half-written.

    tensors: floats are stored in `dtype`, `d2t` as it is, with the `t2d` that follows from it. tokens: the number of
    tokens drafted in one round. max_file_bytes: more than that is divided between files.
    """
    stored = {
        name: (each.to(dtype) if each.is_floating_point() else each).detach().cpu().contiguous()
        for name, each in tensors.items()
    }
    if "d2t" in stored:
        kept = torch.zeros(config.vocab_size, dtype=torch.bool)
        kept[torch.arange(len(stored["d2t"])) + stored["d2t"]] = True
        stored["t2d"] = kept
    write_folder(folder, _config_json(config, target, tokens), stored, max_file_bytes)


def write_folder(
    folder: Path,
    config_json: dict[str, Any],
    tensors: dict[str, Tensor],
    max_file_bytes: int,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint, in place of what was there; the folder is never half-written.

    tensors: as they are stored. files: the contents of further files, by name.
    """
    folder = folder.absolute()
    with scratch_folder(folder) as scratch:
        filling, old = scratch / folder.name, scratch / "old"
        try:
            filling.mkdir()
            for name, content in (files or {}).items():
                (filling / name).write_bytes(content)
            text = json.dumps(config_json, indent=2) + "\n"
            (filling / "config.json").write_text(text, encoding="utf-8")
            _write_tensors(filling, tensors, max_file_bytes)
            if folder.exists():
                os.replace(folder, old)
            os.replace(filling, folder)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written ({error}); free some space, or name another folder"
            ) from error


def _write_tensors(folder: Path, tensors: dict[str, Tensor], max_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _config_json(config: HeadConfig, target: TargetFacts, tokens: int) -> dict[str, Any]:
    if config.kind not in ("eagle3", "block"):
        raise ConfigError(f"{config.kind} heads are read, not written; train an eagle3 or a block head")
    block = config.kind == "block"
    algorithm = ("dspark" if config.markov_rank else "dflash") if block else "eagle3"
    entering = [tap + 1 for tap in config.taps]
    made: dict[str, Any] = {
        "architectures": [
            "DSparkSpeculator" if algorithm == "dspark" else f"{'DFlash' if block else 'Eagle3'}Speculator"
        ],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target.name,
                "architectures": [FAMILIES[target.config.model_type].architecture],
            },
        },
        "transformer_layer_config": layer_json(config),
        "draft_vocab_size": config.outputs,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
    }
    if target.identity is not None:
        made[IDENTITY] = target.identity.as_json()
    if block:
        return made | {
            "aux_hidden_state_layer_ids": entering,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": config.sample_from_anchor,
            "sliding_window_non_causal": not config.causal,
            "causal_head": config.causal,
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    return made | {
        "eagle_aux_hidden_state_layer_ids": entering,
        "norm_before_residual": config.norm_before_residual,  # readers disagree on what its absence means
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def layer_json(config: HeadConfig) -> dict[str, Any]:
    """A head's layers as a config.json of Transformers."""
    made: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": False,
        "rope_theta": config.rope.theta,
    }
    if config.rope.kind != "default":
        made["rope_scaling"] = _rope_json(config.rope)
    if config.window:
        made |= {"sliding_window": config.window, "layer_types": ["sliding_attention"] * config.layers}
    return made


def _rope_json(rope: RopeConfig) -> dict[str, Any]:
    made: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        made["original_max_position_embeddings"] = rope.original_positions
    if rope.kind == "llama3":
        made |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        made |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        made["attention_factor"] = rope.amplitude
    return made
